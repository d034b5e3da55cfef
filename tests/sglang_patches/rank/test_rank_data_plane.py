"""Which buffer a step goes through, and where this rank sends its tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from eep.data_plane.passage import Passage
from sglang_patches import cpu
from sglang_patches.options import BalanceOptions, ServerOptions
from sglang_patches.rank import dispatcher, rank_data_plane
from sglang_patches.rank.dispatcher import RoutedTokens
from sglang_patches.rank.model_facts import ModelFacts
from sglang_patches.rank.rank_data_plane import ANY_STEP, DECODE_STEP, RankDataPlane
from sglang_patches.rank.token_forms import MoeShape, TokenForm

cpu.fill_gaps()


def plane(
    *max_tokens: int,
    on_lost_coverage: Literal["refuse", "mask"] = "refuse",
    balance: BalanceOptions | None = None,
    portion_tokens: int | None = None,
) -> RankDataPlane:
    asked = ServerOptions(
        ranks=2, max_ranks=2, on_lost_coverage=on_lost_coverage, balance=balance, portion_tokens=portion_tokens
    )
    facts = ModelFacts(0, "cpu", max_tokens, asked)
    facts.add_layer(3, MoeShape(experts=16, slots_per_rank=8, hidden=64, topk=2, dtype=torch.float32))
    return RankDataPlane(facts)


@pytest.mark.parametrize(("max_tokens", "decode"), [((64,), ANY_STEP), ((64, 8), DECODE_STEP)])
def test_steps_in_which_all_decode_have_a_buffer_of_their_own_if_there_is_one(
    max_tokens: tuple[int, ...], decode: int
) -> None:
    here = plane(*max_tokens)
    here.use_for(all_decode=True, sizes=[3, 0])
    assert here.passage == Passage(decode)
    here.use_for(all_decode=False, sizes=[3, 0])
    assert here.passage == Passage(ANY_STEP)


def test_a_step_that_the_buffer_has_no_room_for_has_portions_and_one_in_which_all_decode_never_has() -> None:
    here = plane(64, 8, portion_tokens=5)
    here._choose_room(TokenForm("f32", "rank"))
    assert here.passage.portions == 13, "a rank that is alone may have a step of any size"
    for sizes, portions in (([0, 0], 1), ([5, 4], 1), ([0, 6], 2), ([64, 1], 13)):
        here.use_for(all_decode=False, sizes=sizes)
        assert here.passage == Passage(ANY_STEP, portions), sizes
    here.use_for(all_decode=True, sizes=[8, 8])
    assert here.passage == here.decode_passage == Passage(DECODE_STEP)


def test_a_server_whose_steps_fit_has_no_portions_by_default() -> None:
    here = plane(64)
    here._choose_room(TokenForm("f32", "rank"))
    assert here.passage == Passage(ANY_STEP)
    here.use_for(all_decode=False, sizes=[64, 64])
    assert here.passage == Passage(ANY_STEP)


def test_steps_are_not_captured_where_no_buffer_has_room_for_them() -> None:
    with pytest.raises(SystemExit, match="--disable-cuda-graph"):
        _ = plane(64, portion_tokens=5).decode_passage


def test_a_rank_without_tokens_takes_part_in_every_portion_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    here, ran = plane(64, portion_tokens=5), []
    monkeypatch.setattr(rank_data_plane, "get_plane", lambda: here)

    class MoeLayer:
        dispatcher = SimpleNamespace(route=lambda picked: RoutedTokens(picked.topk_ids, picked.topk_weights, picked))

        def __call__(self, x: torch.Tensor, picked: Any) -> torch.Tensor:
            return dispatcher._forward(self.forward_portion, self, x, picked, pre_quant_input=None)

        @staticmethod
        def forward_portion(_: Any, x: torch.Tensor, routed: RoutedTokens) -> None:
            ran.append((len(x), len(routed.slots)))

    here._layers = [MoeLayer(), MoeLayer()]
    here.run_empty(Passage(ANY_STEP, 3))
    assert ran == [(0, 0)] * 6
    assert here.passage == Passage(ANY_STEP), "the step under way keeps its own"


def test_the_buffer_of_a_step_is_put_back_after_one_that_runs_again() -> None:
    here = plane(64, 8)
    buffers: Any = ["any", "decode"]
    here.buffers = buffers

    def run_again() -> None:
        with here.through(Passage(DECODE_STEP)):
            raise ZeroDivisionError(here.buffer)

    with pytest.raises(ZeroDivisionError, match="decode"):
        run_again()
    assert str(here.buffer) == "any"


@pytest.mark.parametrize(("device", "milliseconds"), [("cpu", 30_000.0), ("cuda", 1000.0)])
def test_on_a_cpu_a_rank_waits_longer_in_a_step_that_prefills(device: str, milliseconds: float) -> None:
    here = plane(64)
    here.device = device
    buffers: Any = [SimpleNamespace(timeout_ms=1000.0)]
    here.buffers = buffers
    here.allow_for(prefills=True, sizes=[8, 0])
    assert buffers[0].timeout_ms == milliseconds


def test_there_are_no_buffers_before_the_weights_are_loaded() -> None:
    with pytest.raises(RuntimeError, match="rank 0 has no buffers yet"):
        _ = plane(64).buffer


def test_uses_of_experts_are_counted_only_where_somebody_wants_to_know() -> None:
    assert plane(64).used is None
    for here in (plane(64, on_lost_coverage="mask"), plane(64, balance=BalanceOptions(every=10))):
        assert here.used is not None
        here.used[0, 3] += 2
        here.used[0, 0] += 1
        assert here.count_uses().tolist() == [[0, 0, 2, *([0] * 13)]], "padding is no expert"


def test_gates_of_all_layers_are_counted_and_tokens_keep_their_turn() -> None:
    here = plane(64, balance=BalanceOptions(every=10))
    here._facts.add_layer(4, here._facts.moe_shape)
    picks = torch.tensor([[1, 2], [16, 1], [0, 0]])
    first, again = here.choose(0, picks), here.choose(0, picks)
    assert torch.equal(first, again)
    assert (first[2] == -1).all(), "padding goes nowhere"
    for _ in range(300):
        here.count(0, picks)
        here.count(1, picks.clone())
    counted = here.count_uses()
    steps = int(counted[0, 1])
    assert 15 < steps < 65, "an eighth of them"
    assert counted.tolist() == [[2 * steps, steps, *([0] * 13), steps]] * 2
    for _ in range(30):
        here.count(0, picks)  # steps that end early count nothing
    for _ in range(30):
        here.count(0, picks[:0])
        here.count(1, picks[:0])
    assert here.count_uses().sum() == counted.sum()


@pytest.mark.parametrize("period", [2, 3, 6, 13])
def test_no_step_of_a_load_that_repeats_is_left_out_of_the_counts(period: int) -> None:
    here = plane(64, balance=BalanceOptions(every=10))
    rounds = 200
    for step in range(period * rounds):  # each step of a period picks an expert of its own
        here.count(0, torch.tensor([[1 + step % period, 0]]))
    counted = here.count_uses()[0, :period] / rounds
    assert 0.03 < counted.min() <= counted.max() < 0.25, counted


def test_a_rank_says_that_it_waits_for_its_device_and_then_that_it_runs() -> None:
    here, said = plane(64), list[str]()
    here.advance, here.run = lambda: said.append("gets on"), lambda: said.append("runs")
    here.wait_for(SimpleNamespace(synchronize=lambda: said.append("is done")))
    assert said == ["gets on", "is done", "runs"]


def test_steps_in_which_no_rank_prefills_much_have_no_reason_to_take_long() -> None:
    here, said = plane(64), list[bool]()
    here.may_take_long = said.append
    for prefills, tokens in ((True, 500), (False, 1), (False, 1), (True, 20), (True, 500)):
        here.allow_for(prefills=prefills, sizes=[1, tokens, 0])
    assert said == [True, True, False, False, True], "the results of a step are handed out in the next"
