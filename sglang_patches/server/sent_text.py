"""In the detokenizer: text that a client has is not sent to it again.

SGLang makes text of all tokens that came since the text last ended in a whole character, and sends the beginning of it that
cannot change. After a Chinese character that is everything up to it. If then come two tokens that are no whole characters,
SGLang finds another, shorter beginning, takes that for all it has sent, and sends the rest twice. Where tokens come one by
one this does not happen: the text ended at the Chinese character. But a request that has moved brings all its tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_patches import hooks


def register() -> None:
    hooks.hook("managers.detokenizer_manager.DetokenizerManager._decode_batch_token_id_output", _decode)


def _decode(original: Callable[[Any, Any], list[str]], manager: Any, output: Any) -> list[str]:
    """What was sent of a text that has not ended in a whole character since stays sent."""
    known = ((rid, manager.decode_status.get(rid)) for rid in output.rids)
    ahead = [
        (rid, status, status.sent_offset)
        for rid, status in known
        if status is not None and status.sent_offset > status.decoded_text_len
    ]
    texts = original(manager, output)
    for rid, status, sent in ahead:
        if manager.decode_status.get(rid) is status:
            status.sent_offset = max(status.sent_offset, sent)
    return texts
