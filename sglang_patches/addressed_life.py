"""For which life of a rank a message is, and what front end and ranks tell each other about messages.

A message may be on its way while its rank ends and another life begins, which then gets it. The front end has heard of the
end and sends the request to another rank. So the message names its life, and other lives drop it.

The name travels in the field ``http_worker_ipc``, which every message of SGLang has. Only servers with several tokenizer
processes use it, and those are refused. A rank clears it before SGLang sees it.
"""

from __future__ import annotations

from typing import Any

RECEIVED = "eep: received"
"""The text of an abort message from a rank that is no abort: the request with this wire id has reached the rank."""
REVOKED = "eep: revoked"
"""The text of an abort message to all ranks: a rank that has not begun the request with this wire id is not to begin it."""
RENEWED = "eep: renewed"
"""The text of an abort message to all ranks: the detokenizer that a rank sends to is gone. The rank is to stop all that it
serves, and to send what it makes from now on to the next one."""
MOVED_AWAY = "eep: moved away"
"""The text of an abort message to all ranks: another rank goes on with the request of exactly this wire id."""
ROLE = "eep: role "
"""How the text of an abort message to all ranks begins whose id is the number of a rank, and whose rest is its role."""
_LIFE = "eep life "


def address(message: Any, life: int) -> None:
    message.http_worker_ipc = f"{_LIFE}{life}"


def life_of(message: Any) -> int | None:
    """None for a message that any life may take."""
    given = getattr(message, "http_worker_ipc", None)
    if not isinstance(given, str) or not given.startswith(_LIFE):
        return None
    number = given.removeprefix(_LIFE)
    return int(number) if number.isdecimal() and number.isascii() else None


def is_renewal(message: Any) -> bool:
    return getattr(message, "abort_message", None) == RENEWED


def clear(message: Any) -> None:
    message.http_worker_ipc = None
