"""A front end between a list of what was sent and a list of what was answered, with messages that look like SGLang's."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

from eep.view import View
from sglang_patches.front_end.rank_orders import RankOrders
from sglang_patches.front_end.replay import FrontEnd

UNSENDABLE = 10**25
"""For ``top_k``: what is to be sent is a number, but not one that the wire has."""


@dataclasses.dataclass
class Parameters:
    max_new_tokens: int | None = 8
    top_k: int = 1
    custom_params: dict[str, Any] | None = None
    sampling_seed: int | None = None
    n: int = 1


@dataclasses.dataclass
class TokenizedGenerateReqInput:
    rid: str
    input_ids: array[int] = dataclasses.field(default_factory=lambda: array("q", [7, 8]))
    sampling_params: Parameters = dataclasses.field(default_factory=Parameters)
    stream: bool = True
    routed_dp_rank: int | None = None
    http_worker_ipc: str | None = None
    return_hidden_states: bool = False
    session_params: object = None


@dataclasses.dataclass
class BatchTokenizedGenerateReqInput:
    batch: list[TokenizedGenerateReqInput]

    def __iter__(self) -> Any:
        return iter(self.batch)


@dataclasses.dataclass
class AbortReq:
    rid: str = ""
    abort_all: bool = False
    abort_message: str | None = None


@dataclasses.dataclass
class BatchStrOutput:
    rids: list[str]
    output_ids: list[list[int]]
    output_strs: list[str]
    finished_reasons: list[dict[str, str] | None]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    output_token_logprobs_val: list[list[float]]
    input_token_logprobs_val: list[list[float]]
    customized_info: dict[str, Any] | None = None


def output(
    rid: str,
    tokens: list[int],
    text: str,
    completion: int,
    finished: bool = False,
    customized_info: dict[str, Any] | None = None,
) -> BatchStrOutput:
    logprobs = [float(token) for token in tokens]
    reason = {"type": "stop"} if finished else None
    counts, sums = ([2], [completion], [0]), ([logprobs], [[0.5, 0.5]])
    return BatchStrOutput([rid], [tokens], [text], [reason], *counts, *sums, customized_info)


class Server:
    """A front end between a list of what was sent and a list of what was answered."""

    def __init__(self, **options: Any) -> None:
        self.sent: list[Any] = []
        self.dropped: list[str] = []
        self.revoked: list[str] = []
        self.answered: list[tuple[str, Any]] = []
        self.prompt_tokens: dict[str, int] = {}
        self.now = 0.0
        self.front_end = FrontEnd(
            self._dispatch,
            self._answer,
            RankOrders(
                self.dropped.append,
                self.revoked.append,
                lambda wire: self.sent.append(("MOVE", wire)),
                lambda: self.sent.append("RENEW"),
                lambda rank, role: self.sent.append(("ROLE", rank, role)),
            ),
            clock=lambda: self.now,
            wait_limit=30.0,
            **options,
        )

    def _dispatch(self, message: Any) -> None:
        if getattr(getattr(message, "sampling_params", None), "top_k", 1) == UNSENDABLE:
            raise OverflowError("an integer of more than 64 bits")
        self.sent.append(message)

    def _answer(self, rid: str, reason: Any, prompt_tokens: int) -> None:
        self.answered.append((rid, reason))
        self.prompt_tokens[rid] = prompt_tokens

    def view(self, epoch: int, **incarnations: int) -> None:
        ranks = {int(name[1:]): incarnation for name, incarnation in incarnations.items()}
        numbers = tuple(ranks.get(rank, -1) for rank in range(4))
        self.front_end.on_view(View(epoch, tuple(sorted(ranks)), numbers))

    def accept(self, rid: str, **fields: Any) -> None:
        self.front_end.send(TokenizedGenerateReqInput(rid, **fields))

    def deliver(self, *arguments: Any, **named: Any) -> BatchStrOutput:
        message = output(*arguments, **named)
        self.front_end.output(message, late="LATE")
        return message
