"""What the client of a stream gets when its request is ended by the front end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_patches.front_end import tokenizer_hooks


class Manager:
    """Answers an abort as SGLang's does: a stream of pieces has its last token and all of its text repeated."""

    def __init__(self, tokens: list[int], *, pieces: bool) -> None:
        self.pieces = pieces
        self.rid_to_state = {"r": SimpleNamespace(output_ids=tokens, text="x" * len(tokens), out_list=[])}

    def _handle_abort_req(self, message: Any) -> None:
        state = self.rid_to_state[message.rid]
        tokens = state.output_ids[-1:] if self.pieces else state.output_ids
        state.out_list.append(
            {"text": state.text, "output_ids": tokens, "meta_info": {"completion_tokens": len(state.output_ids)}}
        )

    _handle_abort_req.__wrapped__ = _handle_abort_req  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("tokens", "pieces", "wanted"),
    [
        ([5, 6, 7], True, ([], "")),
        ([5, 6, 7], False, ([5, 6, 7], "xxx")),
        ([], True, ([], "")),
        ([5], True, ([5], "x")),
    ],
)
def test_no_token_is_sent_twice(tokens: list[int], pieces: bool, wanted: tuple[list[int], str]) -> None:
    manager = Manager(tokens, pieces=pieces)
    tokenizer_hooks._answer(manager, SimpleNamespace(rid="r"), 9)
    (out,) = manager.rid_to_state["r"].out_list
    assert (out["output_ids"], out["text"]) == wanted
    assert out["meta_info"]["prompt_tokens"] == 9
