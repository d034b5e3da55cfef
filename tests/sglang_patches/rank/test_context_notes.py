"""What a rank notes about contexts after each step, under every rule by which SGLang gives a request a row and takes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eep.requests.kv.kv_journal import JournalReader, KvJournal, journal_bytes
from sglang_patches.rank import mask_notes
from sglang_patches.rank.kv import anchored_pool, context_notes
from sglang_patches.rank.kv.anchored_pool import AnchoredPool

ROWS = 8
DECODE, EXTEND = (SimpleNamespace(is_decode=lambda decodes=decodes: decodes) for decodes in (True, False))


class Request:
    def __init__(self, wire: str, prompt: int, row: int) -> None:
        self.rid, self.prompt = wire, prompt
        self.kv: Any = SimpleNamespace(req_pool_idx=row)
        self.output_ids: list[int] = []
        self.computed = 0


class Scheduler:
    """As much of SGLang as decides when a row is named: launches steps, hands their results out, frees rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = np.zeros(journal_bytes(ROWS), np.uint8)
        pool = object.__new__(AnchoredPool)
        pool._indices, pool.journal = None, KvJournal(memory, ROWS, life=0)
        monkeypatch.setattr(anchored_pool, "_pool", pool)
        self.reader = JournalReader(memory)

    def launch(self, *steps: tuple[Request, int], mode: Any = EXTEND) -> Any:
        """Each request gets so many tokens computed. The batch is a copy, as SGLang makes one for the results."""
        for request, tokens in steps:
            request.computed += tokens
        requests = [request for request, _ in steps]
        return SimpleNamespace(
            reqs=requests,
            forward_mode=mode,
            req_pool_indices=torch.tensor([request.kv.req_pool_idx for request in requests], dtype=torch.int64),
            seq_lens_cpu=torch.tensor([request.computed for request in requests], dtype=torch.int64),
            whole=[request.computed >= request.prompt for request in requests],
        )

    def decode(self, *requests: Request) -> Any:
        return self.launch(*((request, 1) for request in requests), mode=DECODE)

    def hand_out(self, batch: Any) -> None:
        for request, is_whole in zip(batch.reqs, batch.whole, strict=True):
            if is_whole and request.kv.req_pool_idx is not None:
                request.output_ids.append(7)
        context_notes.note(batch)

    def free(self, request: Request) -> None:
        """It has ended, is aborted or retracted: the hook runs before SGLang takes the row."""
        context_notes._withdraw(None, request)
        request.kv.req_pool_idx = None

    def noted(self, wire: str) -> int:
        line = self.reader.find(0, wire)
        return 0 if line is None else line.tokens


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    return Scheduler(monkeypatch)


def test_a_prompt_and_then_every_token_of_its_answer_are_noted(scheduler: Scheduler) -> None:
    a, b = Request("a", 30, row=3), Request("b", 20, row=5)
    scheduler.hand_out(scheduler.launch((a, 30), (b, 20)))
    assert (scheduler.noted("a"), scheduler.noted("b")) == (30, 20)
    for step in range(1, 4):
        scheduler.hand_out(scheduler.decode(a, b))
        assert (scheduler.noted("a"), scheduler.noted("b")) == (30 + step, 20 + step)


def test_with_overlap_a_step_under_way_is_not_noted(scheduler: Scheduler) -> None:
    a = Request("a", 30, row=3)
    first = scheduler.launch((a, 30))
    second = scheduler.decode(a)
    scheduler.hand_out(first)
    assert scheduler.noted("a") == 30
    scheduler.hand_out(second)
    assert scheduler.noted("a") == 31


def test_with_overlap_a_step_that_holds_an_ended_request_notes_nothing_of_it(scheduler: Scheduler) -> None:
    a, b = Request("a", 30, row=3), Request("b", 20, row=5)
    first = scheduler.launch((a, 30), (b, 20))
    second = scheduler.decode(a, b)
    scheduler.hand_out(first)
    scheduler.free(a)
    c = Request("c", 40, row=3)
    third = scheduler.launch((c, 40))
    scheduler.hand_out(second)
    assert (scheduler.noted("a"), scheduler.noted("b"), scheduler.noted("c")) == (0, 21, 0)
    scheduler.hand_out(third)
    assert scheduler.noted("c") == 40


def test_a_request_that_is_aborted_before_its_results_come_is_not_noted(scheduler: Scheduler) -> None:
    a = Request("a", 30, row=3)
    step = scheduler.launch((a, 30))
    scheduler.free(a)
    scheduler.hand_out(step)
    assert scheduler.noted("a") == 0


def test_a_retracted_request_is_noted_again_when_it_is_computed_again(scheduler: Scheduler) -> None:
    a, b = Request("a", 30, row=3), Request("b", 20, row=5)
    scheduler.hand_out(scheduler.launch((a, 30), (b, 20)))
    under_way = scheduler.decode(a, b)
    scheduler.free(a)
    scheduler.hand_out(under_way)
    assert (scheduler.noted("a"), scheduler.noted("b")) == (0, 21)
    a.kv.req_pool_idx, a.computed = 6, 0
    scheduler.hand_out(scheduler.launch((a, 31)))
    scheduler.hand_out(scheduler.decode(b, a))
    assert (scheduler.noted("a"), scheduler.noted("b")) == (32, 22)


def test_a_request_with_another_row_by_now_is_not_noted_under_the_old_one(scheduler: Scheduler) -> None:
    a = Request("a", 30, row=3)
    step = scheduler.launch((a, 30))
    a.kv.req_pool_idx = 4
    scheduler.hand_out(step)
    assert scheduler.noted("a") == 0


def test_requests_that_share_a_prefix_have_a_line_each(scheduler: Scheduler) -> None:
    """What is found in the prefix cache is in the cache too, and counts."""
    a, b = Request("a", 30, row=3), Request("b", 35, row=5)
    scheduler.hand_out(scheduler.launch((a, 30)))
    b.computed = 30
    scheduler.hand_out(scheduler.launch((b, 5)))
    scheduler.free(a)
    assert (scheduler.noted("a"), scheduler.noted("b")) == (0, 35)


def test_answers_and_prompts_in_one_step(scheduler: Scheduler) -> None:
    """SGLang's mixed chunks."""
    a, b = Request("a", 30, row=3), Request("b", 20, row=5)
    scheduler.hand_out(scheduler.launch((a, 30)))
    scheduler.hand_out(scheduler.launch((b, 20), (a, 1)))
    assert (scheduler.noted("a"), scheduler.noted("b")) == (31, 20)


def test_a_prompt_is_noted_part_by_part(scheduler: Scheduler) -> None:
    a = Request("a", 100, row=3)
    for parts, tokens in ((1, 40), (2, 80), (3, 100)):
        scheduler.hand_out(scheduler.launch((a, tokens - a.computed)))
        assert scheduler.noted("a") == tokens, f"{parts} parts are computed"
    scheduler.hand_out(scheduler.decode(a))
    assert scheduler.noted("a") == 101


def test_with_overlap_the_part_of_a_prompt_that_is_under_way_is_not_noted(scheduler: Scheduler) -> None:
    a = Request("a", 100, row=3)
    first = scheduler.launch((a, 40))
    second = scheduler.launch((a, 40))
    scheduler.hand_out(first)
    assert scheduler.noted("a") == 40
    scheduler.free(a)
    scheduler.hand_out(second)
    assert scheduler.noted("a") == 0, "it is aborted"


def test_a_flush_withdraws_everything(scheduler: Scheduler) -> None:
    a = Request("a", 30, row=3)
    scheduler.hand_out(scheduler.launch((a, 30)))
    context_notes._withdraw_all(None)
    assert scheduler.noted("a") == 0


def test_a_rank_that_has_no_work_notes_nothing(scheduler: Scheduler) -> None:
    scheduler.hand_out(SimpleNamespace(reqs=[], whole=[]))


@pytest.mark.parametrize(
    "request_of_a_version",
    [
        SimpleNamespace(kv=SimpleNamespace(req_pool_idx=5)),
        SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=9), req_pool_idx=5),
    ],
    ids=["0.5.21", "0.5.17"],
)
def test_the_row_of_a_request_is_found_in_every_version(request_of_a_version: Any) -> None:
    assert context_notes.row_of(request_of_a_version) == 5


def test_what_was_computed_while_experts_were_masked_is_no_context_for_another_rank(scheduler: Scheduler) -> None:
    """Neither what a request had before, nor what comes later, nor another part of its prompt."""
    clean, masked = Request("clean", 20, row=3), Request("masked", 40, row=5)
    scheduler.hand_out(scheduler.launch((clean, 20), (masked, 20)))
    assert scheduler.noted("masked") == 20
    part = scheduler.launch((masked, 20))
    mask_notes.note(part)
    assert scheduler.noted("masked") == 0
    scheduler.hand_out(part)
    scheduler.hand_out(scheduler.decode(clean, masked))
    assert (scheduler.noted("clean"), scheduler.noted("masked")) == (21, 0)
