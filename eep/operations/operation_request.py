"""What an operator asks for, as a value: an action, what it is for, and an id that its client chose. Pure."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from eep.errors import EepError

MOST_BYTES = 16 << 10
"""The largest request."""
LONGEST_S = 3600.0
ActionName = Literal["remove", "launch", "replace", "kill", "role", "scale", "drain", "undrain", "drill"]
ACTIONS: tuple[str, ...] = get_args(ActionName)
OF_A_RANK = ("remove", "launch", "replace", "kill", "role", "drill")
RoleName = Literal["experts", "both"]
"""What a rank serves: experts only, or requests and experts."""

Identifier = Annotated[str, Meta(pattern=r"^(?!\.+$)[A-Za-z0-9._:-]{1,64}$(?!\n)")]
"""Not of dots alone: that would be another place in a path."""


class BadOperation(EepError, ValueError):
    """A request that names no operation. Nothing was changed."""


class OperationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``id`` names the operation: asking again with it does nothing twice.

    ``rank`` is for the actions on one rank, ``ranks`` for ``scale``: how many there are to be, ``role`` for ``role``. An
    operation that is not done after ``deadline_s`` seconds has failed.
    """

    id: Identifier
    action: ActionName
    rank: Annotated[int, Meta(ge=0, lt=65536)] | None = None
    ranks: Annotated[int, Meta(ge=1, le=65536)] | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=LONGEST_S)] = 600.0
    role: RoleName | None = None


def parse_request(body: bytes) -> OperationRequest:
    """The request in ``body``, which is JSON. :class:`BadOperation` says what is wrong with it."""
    if len(body) > MOST_BYTES:
        raise BadOperation(f"the request has {len(body)} bytes; at most {MOST_BYTES} are read")
    if not body.strip():
        raise BadOperation(
            'the request has no body; send JSON, such as {"id": "grow-1", "action": "scale", "ranks": 6}'
        )
    try:
        request = msgspec.json.decode(body, type=OperationRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadOperation(f"this is no operation: {error}") from error
    return check_request(request)


def check_request(request: OperationRequest) -> OperationRequest:
    """``request``, if it has what its action needs and nothing else."""
    needs_rank, needs_ranks = request.action in OF_A_RANK, request.action == "scale"
    if needs_rank is (request.rank is None):
        wanted = "needs 'rank', the number of a rank" if needs_rank else "is for the whole server: leave out 'rank'"
        raise BadOperation(f"{request.action} {wanted}")
    if needs_ranks is (request.ranks is None):
        wanted = "needs 'ranks', how many there are to be" if needs_ranks else "takes no 'ranks'"
        raise BadOperation(f"{request.action} {wanted}")
    if (request.action == "role") is (request.role is None):
        wanted = "needs 'role', experts or both" if request.role is None else "takes no 'role'"
        raise BadOperation(f"{request.action} {wanted}")
    return request
