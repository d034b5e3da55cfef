"""Hundreds of seeded schedules, each checked after every event and then for liveness.

To look at one: ``Schedule(seed).run()``. To look for more: ``make soak``, which adds what it finds to
``seeds.txt``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eep.control.store.key_value import KeyValue, StoredValue, Swap
from eep.control.supervisor import rank_watch, stall_watch
from eep.membership import Standstill, coordination, decide, judge
from tests.membership.sim.schedule import Schedule

SEEDS, IN_CI = 1000, 300
CHUNK = 100
REGRESSIONS = Path(__file__).with_name("seeds.txt")


def regression_seeds() -> list[int]:
    lines = REGRESSIONS.read_text().splitlines()
    return [int(line.split("#")[0]) for line in lines if line.split("#")[0].strip()]


def run(seed: int) -> None:
    try:
        Schedule(seed).run()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error


def run_many(seeds: range) -> None:
    for seed in seeds:
        run(seed)


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.long] * (first >= IN_CI)) for first in range(0, SEEDS, CHUNK)]
)
def test_contract_holds_and_the_instance_recovers(first: int) -> None:
    run_many(range(first, first + CHUNK))


@pytest.mark.parametrize("seed", regression_seeds())
def test_what_failed_once(seed: int) -> None:
    run(seed)


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [Schedule(7), Schedule(7)]
    for schedule in runs:
        schedule.run()
    assert runs[0].instance == runs[1].instance
    assert runs[0].world.counts == runs[1].world.counts
    assert runs[0].watchdog.views == runs[1].watchdog.views


def test_a_store_that_does_not_compare_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator can fail: with compare-and-swap broken it finds two views of one epoch, or worse."""
    honest = KeyValue.compare_and_swap

    def careless(self: Any, key: str, expected: int, value: Any, lease: int | None = None) -> Swap[Any]:
        current: StoredValue[Any] | None = self.get(key)
        return honest(self, key, current.version if current else 0, value, lease)

    monkeypatch.setattr(KeyValue, "compare_and_swap", careless)
    with pytest.raises(AssertionError):
        run_many(range(200))


def test_removing_on_mere_suspicion_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator can fail: a coordinator that takes the accused out while they live is found out."""

    def hasty(instance: Any, reports: Any, **options: Any) -> Any:
        accused = judge(instance.view.active, [a for r in reports.values() for a in r.accusations])
        if accused and options["judge_epoch"] == instance.view.epoch:
            return replace(instance, serial=instance.serial + 1, view=instance.view.without(accused))
        return decide(instance, reports, **options)

    monkeypatch.setattr(coordination, "decide", hasty)
    with pytest.raises(AssertionError, match="removed alive"):
        run_many(range(200))


def test_a_watch_that_never_finds_a_rank_stalled_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator can fail: ranks that all hang at once are not left alone."""
    monkeypatch.setattr(rank_watch, "has_stalled", lambda seen, deadline: False)
    with pytest.raises(AssertionError, match="no host has noticed"):
        run_many(range(200))


def test_a_watch_that_counts_what_it_did_not_see_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator can fail: a clock that jumps while a rank pauses for a moment does not make it stalled."""

    def naive(before: Standstill | None, incarnation: int, word: int, now: float, due_after: float) -> Standstill:
        if before is None or (before.incarnation, before.word) != (incarnation, word):
            return Standstill(incarnation, word, now)
        return Standstill(incarnation, word, now, before.seconds + now - before.looked_at)

    monkeypatch.setattr(stall_watch, "after_look", naive)
    with pytest.raises(AssertionError, match="taken for stalled"):
        run_many(range(400))
