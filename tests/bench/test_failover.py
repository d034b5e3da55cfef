"""The arithmetic of the bench of failover, on a story that is made up."""

from __future__ import annotations

import inspect
import os
import random
import sys
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.common import moment_log
from bench.common.comparison import sum_up_phases, sum_up_turns
from bench.common.phases import Phase, _cpu_seconds, _cpu_seconds_since
from bench.common.provenance import command_line
from bench.common.steady_clients import Clients
from bench.common.turns import Turn, _while_all_stream, blocks, compared, planned
from bench.failover import kills
from bench.failover.fixed_membership import OF_A_RANK, OF_A_STEP_AHEAD, OF_THE_FRONT_END, Switch, register
from bench.failover.kills import WINDOW, Wrong, brought_in, costs, kill_all, victims, wrong_answers
from bench.failover.report import NAMES, _brought_in, percentiles, throughput
from eep.drill.load import Load
from eep.drill.query_answers import Answer
from eep.drill.story import Fault
from eep.recovery.session import Session
from eep.view import View
from sglang_patches.front_end.replay import FrontEnd
from sglang_patches.rank.overlap import LaunchedStep


def made_up() -> tuple[Any, Fault]:
    """Two clients get a token every 0.1 s; rank 1 is killed at 10, which costs one of them 0.5 s and the other, whose
    request goes on elsewhere, 0.8 s; it is back at 14."""
    load = Load("", [[1]], [[1]], clients=0)
    before = [round(0.1 * number, 3) for number in range(1, 101)]
    after = [round(10.5 + 0.1 * number, 3) for number in range(100)]
    late = [*before[:-1], 10.7]  # of a request that the lost rank had
    load.answers = [Answer(0, 0.0, [1] * 200, [*before, *after], rank=0), Answer(0, 0.0, [1] * 100, late, rank=1)]
    views = [
        (0.0, View(1, (0, 1), (0, 0)), True),
        (10.05, View(2, (0,), (0, 0)), False),
        (10.2, View(2, (0,), (0, 0)), True),
        (13.95, View(3, (0, 1), (0, 1)), False),
        (14.02, View(3, (0, 1), (0, 1)), True),
    ]
    return SimpleNamespace(load=load, views=views, started=0.0), Fault(1, "killed", 10.001, 0.049, 0.199, 4.019)


def test_what_a_kill_cost() -> None:
    story, fault = made_up()
    (kill,) = costs(story, [fault])
    assert kill.pause == kill.pause_moved == pytest.approx(0.8)
    assert kill.pause_others == pytest.approx(0.5)
    assert kill.first_token == pytest.approx(0.499)
    assert kill.usual_gap == pytest.approx(0.1)
    assert kill.pause_at_rejoin == pytest.approx(0.1)
    assert kill.rejoining == pytest.approx(0.07)
    assert (kill.tokens_before, kill.tokens_during, kill.tokens_after) == (59, 37, 30)
    assert throughput([kill]) == {
        "before": pytest.approx(59 / WINDOW, abs=0.1),
        "during": pytest.approx(37 / 4.019, abs=0.1),
        "after": pytest.approx(30 / WINDOW),
    }


class Killed:
    """A story in which every rank comes back; the user interrupts it before the kill of that number, from 1 on."""

    def __init__(self, interrupted_before: int) -> None:
        self.target, self._left = self, interrupted_before
        self.started, self.faults, self.moments = 0.0, [], []

    def wait_for_spares(self, count: int) -> list[int]:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt
        return [0] * count

    def ranks(self) -> dict[int, Any]:
        return {rank: SimpleNamespace(pid=4711) for rank in range(2)}

    def wait_until_noticed(self, fault: Fault) -> bool:
        return True

    def wait_until_all_run(self, ranks: int) -> bool:
        return True


def test_an_interrupted_bench_keeps_the_kills_that_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    killed, said = [], []
    monkeypatch.setattr(kills.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(kills.os, "kill", lambda pid, signal: killed.append(pid))
    story: Any = Killed(interrupted_before=3)
    over = kill_all(story, 2, [1, 0, 1, 0], 1, said.append)
    assert [fault.rank for fault in over] == [1, 0]
    assert len(killed) == 2
    assert said[-1] == "interrupted after 2 of 4 kills"
    story = Killed(interrupted_before=1)
    with pytest.raises(KeyboardInterrupt):
        kill_all(story, 2, [1], 1, said.append)


def test_where_an_answer_is_wrong() -> None:
    story, fault = made_up()
    story.load.wanted = [[1] * 200]
    story.load.answers[1].tokens = [1] * 99 + [2]
    story.load.wanted[0] = [1] * 100
    story.load.answers[0].tokens = [1, 1, 5] + [1] * 97
    moved = Wrong(prompt=0, place=99, rank=1, at=pytest.approx(10.7), got=[2], wanted=[1], moved_after=99)
    stayed = Wrong(
        prompt=0, place=2, rank=0, at=pytest.approx(0.3), got=[5, 1, 1, 1], wanted=[1, 1, 1, 1], moved_after=None
    )
    assert wrong_answers(story, [fault]) == [stayed, moved]


def test_percentiles_are_values_that_were_measured() -> None:
    values = [number / 1000 for number in range(1, 21)]
    assert percentiles(values) == {"p50_ms": 10.0, "p99_ms": 20.0, "samples": 20}
    assert percentiles([0.004]) == {"p50_ms": 4.0, "p99_ms": 4.0, "samples": 1}


def test_every_rank_is_killed_as_often_and_the_seed_decides() -> None:
    order = victims(4, 20, seed=1)
    assert [order.count(rank) for rank in range(4)] == [5, 5, 5, 5]
    assert order == victims(4, 20, seed=1)
    assert order != victims(4, 20, seed=2)


def test_phases_are_compared_in_pairs_whichever_came_first() -> None:
    phases = [Phase(True, 90, 6, 11), Phase(False, 100, 5, 10), Phase(False, 50, 5, 20), Phase(True, 45, 6, 22)]
    told = sum_up_phases(phases, NAMES)
    assert told["tokens_per_second"]["elastic_over_fixed"] == pytest.approx(0.9)
    assert told["ms_between_tokens"]["elastic_over_fixed"] == pytest.approx(1.2)
    assert told["cpu_ms_per_token"]["elastic_over_fixed"] == pytest.approx(1.1)
    assert (told["tokens_per_second"]["elastic"], told["tokens_per_second"]["fixed"]) == (67.5, 75)
    assert told["cpu_ms_per_token"]["of_all_phases"] == pytest.approx(33 / 30)


def steps_in_turns(turns: list[Turn], elastic: float, drift: float) -> list[float]:
    """A rank whose step takes 10 ms, or so many seconds in turns with elasticity, and always a little more than before."""
    began, now = [], 0.0
    while now < turns[-1].ended + 1:
        began.append(now)
        is_elastic = any(turn.on and turn.began <= now < turn.ended for turn in turns)
        now += (elastic if is_elastic else 0.01) * (1 + drift * now)
    return began


def test_turns_tell_what_a_step_costs_whatever_drifts() -> None:
    turns = [Turn(elastic, 1.0 + at, 2.0 + at) for at, elastic in enumerate([True, False, False, True] * 4)]
    found = blocks([steps_in_turns(turns, elastic=0.0102, drift=0.02)] * 2, turns)
    assert [block.ratio for block in found] == pytest.approx([1 / 1.02] * 4, abs=0.004)
    assert [block.without_stalls for block in found] == pytest.approx([block.ratio for block in found])
    told = compared([block.ratio for block in found])
    assert (told.blocks, told.mean) == (4, pytest.approx(1 / 1.02, abs=0.002))
    assert told.least < told.mean < told.most


def test_elasticity_that_takes_twice_as_long_is_not_taken_for_stalls() -> None:
    turns = [Turn(elastic, 1.0 + at, 2.0 + at) for at, elastic in enumerate([True, False, False, True])]
    (found,) = blocks([steps_in_turns(turns, elastic=0.03, drift=0)], turns)
    assert found.without_stalls == pytest.approx(1 / 3, abs=0.01)
    assert found.off_ms == pytest.approx(10)


def test_only_blocks_count_in_which_every_client_streams() -> None:
    turns = [Turn(elastic, 1.0 + at, 2.0 + at) for at, elastic in enumerate([True, False, False, True] * 4)]
    begins_late = Answer(0, 0.0, [1] * 2, [2.5, 20.0])
    ends_early = Answer(0, 0.0, [1] * 2, [0.5, 16.5])
    assert _while_all_stream([begins_late, ends_early], turns) == turns[4:12]


def steps_with_stalls(until: float) -> list[float]:
    """A rank whose step takes 3 ms, and at the same place in every second 50 ms."""
    began, now = [], 0.0
    while now < until:
        began.append(now)
        now = round(now + 0.003, 6)
        if 0.1 <= now % 1.0 < 0.15:
            now = int(now) + 0.15
    return began


def test_what_comes_every_second_hits_both_kinds_of_turns_alike() -> None:
    turns, now = [], 1.0
    for elastic, seconds in islice(planned(random.Random(1), 0.25), 400):
        turns.append(Turn(elastic, now, now + seconds))
        now += seconds
    found = blocks([steps_with_stalls(now + 1)], turns)
    told, usual = (compared([getattr(block, name) for block in found]) for name in ("ratio", "without_stalls"))
    assert len(found) == 100
    assert told.least < 1 < told.most
    assert told.most - told.least < 0.05
    assert {turn.on for turn in turns[::4]} == {True, False}
    assert (usual.least, usual.most) == pytest.approx((1, 1), abs=0.001)  # and without them there is nothing to tell
    in_all = sum_up_turns(found, NAMES)
    assert in_all["us_more_per_step"] == pytest.approx([0, 0, 0], abs=3)
    assert in_all["fixed_step_ms"] == pytest.approx(3, abs=0.01)
    assert (
        in_all["fixed_stalled"] == pytest.approx(0.05, abs=0.01) == pytest.approx(in_all["elastic_stalled"], abs=0.01)
    )


def test_a_rank_notes_when_its_steps_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moment_log, "_KEPT", 4)
    log = moment_log.MomentLog(tmp_path, "steps")
    before = time.monotonic()
    for count in range(1, 7):
        log.note(10 * count)
        (both,) = moment_log.read_moments(tmp_path, "steps")
        noted = [moment for moment, _ in both]
        assert [number for _, number in both] == [10 * each for each in range(max(1, count - 3), count + 1)]
        assert len(noted) == min(count, 4)
        assert noted == sorted(noted)
        assert before <= noted[0] <= noted[-1] <= time.monotonic()
        newest = noted[-1]
    log.note()
    assert moment_log.read_moments(tmp_path, "steps")[0][-2][0] == newest  # the oldest have gone, not the newest


def test_what_was_brought_in_is_read_off_the_log() -> None:
    log = """epoch 2: 3 experts brought in (12 KiB from peer, 6 KiB from disk)
epoch 2: rank 1: nothing
[2026-01-01 00:00:00 DP0 TP0 EP0] epoch 4: 2 experts brought in (1024 KiB from peer)
"""
    assert brought_in(log) == {"experts": 5, "peer": 1036, "disk": 6}
    assert (
        _brought_in(brought_in(log)) == "ranks brought in 5 experts of a layer (1.0 MiB from peer, 0.0 MiB from disk)"
    )
    assert _brought_in(brought_in("")) == "ranks brought in 0 experts of a layer"


def test_a_stuck_switch_leaves_elasticity_on(tmp_path: Path) -> None:
    works, stuck = Switch(tmp_path / "works"), Switch(tmp_path / "stuck", stuck=True)
    for switch in (works, stuck):
        switch.throw(elastic=False)
    said = [Path(switch.environment()["EEP_BENCH_SWITCH"]).read_bytes() for switch in (works, stuck)]
    assert said == [b"\1", b"\0"]


def test_the_switch_takes_elasticity_out_of_a_session_and_puts_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, methods in ((Session, OF_A_RANK), (LaunchedStep, OF_A_STEP_AHEAD), (FrontEnd, OF_THE_FRONT_END)):
        for name in methods:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # so that it is as it was afterwards
    switch = Switch(tmp_path / "switch")
    monkeypatch.setenv("EEP_BENCH_SWITCH", switch.environment()["EEP_BENCH_SWITCH"])
    register()
    session = Session.__new__(Session)  # which has nothing that an elastic one needs
    for elastic in (True, False, True):
        switch.throw(elastic=elastic, front_end=False)
        if elastic:
            with pytest.raises(AttributeError):
                session.settle()
            with pytest.raises(AttributeError):
                session.collect(lambda: 7)
        else:
            session.settle()
            assert session.collect(lambda: 7) == 7
    assert [len(steps) for steps in switch.steps()] == [3]


def test_turns_that_are_too_short_or_too_few_tell_nothing() -> None:
    turns = [Turn(elastic, 1 + at / 100, 1.01 + at / 100) for at, elastic in enumerate([True, False, False, True])]
    with pytest.raises(ValueError, match="too short"):
        blocks([[0.5, 1.035, 3.0]], turns)
    with pytest.raises(ValueError, match="at least eight turns"):
        compared([1.0])


@pytest.mark.parametrize(
    ("tokens", "is_wrong"), [([1, 2], False), ([1, 2, 3, 9], False), ([1, 5], True), ([1, 2, 4, 9], True)]
)
def test_an_answer_of_another_length_is_checked_as_far_as_it_is_known(tokens: list[int], is_wrong: bool) -> None:
    clients = Clients("", [[7]], [[1, 2, 3]], ranks=1, count=1, tokens=4)
    assert bool(clients.problems([Answer(0, 0.0, tokens)])) == is_wrong


@pytest.mark.parametrize(
    ("owner", "name", "fixed"),
    [(Session, *each) for each in OF_A_RANK.items()]
    + [(LaunchedStep, *each) for each in OF_A_STEP_AHEAD.items()]
    + [(FrontEnd, *each) for each in OF_THE_FRONT_END.items()],
)
def test_what_takes_the_place_of_elasticity_is_called_alike(owner: type, name: str, fixed: Any) -> None:
    def called(function: Any) -> list[tuple[str, Any]]:
        return [(each.name, each.kind) for each in list(inspect.signature(function).parameters.values())[1:]]

    assert called(fixed) == called(getattr(owner, name))


def test_processor_time_of_processes_that_have_gone_is_left_out() -> None:
    before = {**_cpu_seconds([os.getpid()]), 2**22 + 1: 7.0}
    assert set(_cpu_seconds(before)) == {os.getpid()}
    assert 0 <= _cpu_seconds_since(before) < 60


def test_a_command_does_not_say_where_its_files_went(monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(Path(__file__).parents[2] / "bench" / "failover" / "__main__.py")
    monkeypatch.setattr(sys, "argv", [script, "--kills", "3", "--out", "/somewhere", "--results=/else", "--pairs", "2"])
    assert command_line() == "python -m bench.failover --kills 3 --pairs 2"
