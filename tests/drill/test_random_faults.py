"""Faults at random: what comes when is decided by the seed, and what it hits are real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import cast

import pytest

from eep.drill.faults import Rank, Target
from eep.drill.random_faults import JOINER, KILLS, SPARE, STOP, DoneFault, FaultMix, RandomFaults, plan_faults


def test_the_seed_decides_what_comes_when() -> None:
    first, again, other = (list(islice(plan_faults(FaultMix(), seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_every_kind_of_fault_comes() -> None:
    orders = list(islice(plan_faults(FaultMix(), 1), 300))
    assert {order.kind for order in orders} == {*KILLS, STOP, JOINER, SPARE}
    assert all(0.3 <= order.pause <= 8.0 for order in orders)
    assert all(3.0 <= order.seconds <= 20.0 for order in orders if order.kind == STOP)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"weights": {"kill-9": 1.0}}, "there are no faults called"),
        ({"gap": (3.0, 1.0)}, "gap must be two numbers"),
        ({"stopped": (-1.0, 1.0)}, "stopped must be two numbers"),
    ],
)
def test_a_weather_that_makes_no_sense_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FaultMix(**wrong)  # type: ignore[arg-type]


class Host:
    """Real processes in the place of ranks and spares; each that ends gets another life at once."""

    def __init__(self, ranks: int, spares: int) -> None:
        self._lives = [0] * ranks
        self._processes = [_sleeper() for _ in range(ranks)]
        self._spares = [_sleeper() for _ in range(spares)]
        self._lock = threading.Lock()  # joiners and sleepers are looked after by threads of their own

    def ranks(self) -> dict[int, Rank]:
        with self._lock:
            for rank, process in enumerate(self._processes):
                if process.poll() is not None:
                    self._processes[rank], self._lives[rank] = _sleeper(), self._lives[rank] + 1
            return {rank: Rank(rank, self._lives[rank], each.pid, True) for rank, each in enumerate(self._processes)}

    def spares(self) -> list[int]:
        return [each.pid for each in self._spares if each.poll() is None]

    def states(self) -> list[str]:
        return [Path(f"/proc/{each.pid}/stat").read_text().rpartition(")")[2].split()[0] for each in self._processes]

    def end(self) -> None:
        for process in (*self._processes, *self._spares):
            process.kill()
            process.wait()


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(ranks=4, spares=2)
    yield made
    made.end()


def struck(host: Host, enough: Callable[[list[DoneFault]], object], **weights: float) -> list[DoneFault]:
    """What was done, again and for longer until it is ``enough``: what is done in a second says how busy it is."""
    fault_mix = FaultMix(gap=(0.01, 0.05), weights=weights, stopped=(0.05, 0.1), joining=(0.01, 0.02))
    done: list[DoneFault] = []
    for seed in range(1, 15):
        faults = RandomFaults(cast(Target, host), fault_mix, seed, say=lambda text: None)
        faults.run(0.4 * seed)
        done += faults.done
        if enough(done):
            return done
    raise AssertionError(f"this is not enough: {done}")


def test_two_and_three_ranks_are_killed_at_once(host: Host) -> None:
    def enough(done: list[DoneFault]) -> bool:
        host.ranks()  # which gives those that have died another life
        return {len(fault.ranks) for fault in done} == {2, 3} and min(host._lives) > 0

    struck(host, enough, **{"kill-2": 1.0, "kill-3": 1.0})


def test_stopped_ranks_are_awake_at_the_end(host: Host) -> None:
    done = struck(host, lambda done: len(done) > 2, stop=1.0)
    assert {fault.kind for fault in done} == {STOP}
    assert "T" not in host.states()


def test_a_joiner_is_killed_in_the_life_after(host: Host) -> None:
    done = struck(host, lambda done: any(fault.kind == JOINER for fault in done), joiner=1.0)
    for fault in done:
        if fault.kind == JOINER:
            (rank, life), *_ = fault.ranks
            before = [each for earlier in done if earlier.at < fault.at for each in earlier.ranks]
            assert any(other == rank and earlier_life < life for other, earlier_life in before)


def test_spares_are_killed_while_there_are_any(host: Host) -> None:
    done = struck(host, lambda done: not host.spares(), spare=1.0)
    # On a busy machine one that was killed may be there long enough to be killed again.
    assert {fault.kind for fault in done} == {SPARE}
    for process in host._spares:
        assert process.wait(60) == -signal.SIGKILL


def test_a_rank_that_was_fenced_while_it_stood_still_is_not_woken(host: Host) -> None:
    faults = RandomFaults(cast(Target, host), FaultMix(), seed=1, say=lambda text: None)
    rank = host.ranks()[0]
    host._processes[0].send_signal(signal.SIGKILL)
    host._processes[0].wait()
    assert not faults._has_pid(rank)
