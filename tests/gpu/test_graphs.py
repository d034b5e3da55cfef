"""One captured graph per survivor, replayed while ranks die, go, come and are replaced under it."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest

import eep
from tests import moe
from tests.gpu.graph_ranks import GraphProgram
from tests.ranks import Ranks

ALL = (0, 1, 2, 3)
CONFIG = moe.Config(ranks=4, max_ranks=4, hidden=2048, max_tokens=16, topk=4, device="cuda")


def check(group: Ranks, ranks: tuple[int, ...], seed: int, count: int) -> None:
    for rank, (done, status) in group.all(ranks, "replay", seed, ranks, count).items():
        assert status.ok, f"rank {rank}: {status}"
        assert done == count


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_thousand_replays_of_one_graph(rendezvous: eep.Rendezvous, overlaps: bool) -> None:
    config = dataclasses.replace(CONFIG, overlaps=overlaps)
    with Ranks(rendezvous, config, timeout_ms=1000, program=GraphProgram) as group:
        group.start(ALL)
        addresses = group.all(ALL, "capture")
        group.all(ALL, "connect", list(ALL), epoch=2)
        group.all(ALL, "barrier")
        check(group, ALL, seed=0, count=300)

        # killed in the middle of replays
        group.begin(ALL, "replay", 1000, ALL, 100_000)
        group[2].kill()
        survivors = (0, 1, 3)
        for rank in survivors:
            done, status = group[rank].answer()
            assert 2 in status.suspects
            assert done > 0
        group.all(survivors, "disconnect", [2])
        check(group, survivors, seed=2000, count=200)

        # a replacement captures alone, then joins
        newcomer = group.launch(2)
        newcomer.call("capture")
        newcomer.send("join")
        group.all(survivors, "connect", [2])
        newcomer.answer()
        check(group, ALL, seed=3000, count=300)

        # removed in good order, and rank 0 at that
        group.all((1, 2, 3), "disconnect", [0])
        check(group, (1, 2, 3), seed=4000, count=200)
        after = group.all((1, 3), "addresses")
        assert after == {rank: addresses[rank] for rank in (1, 3)}


def test_many_cycles_leak_no_device_memory(rendezvous: eep.Rendezvous) -> None:
    """All but one die and come back, three at a time, 66 in all."""
    survivors, victims = (0,), (1, 2, 3)
    with Ranks(rendezvous, CONFIG, timeout_ms=1000, program=GraphProgram) as group, ThreadPoolExecutor(3) as pool:
        group.start(ALL)
        group.all(ALL, "capture")
        group.all(ALL, "connect", list(ALL), epoch=2)
        group.all(ALL, "barrier")
        free = None
        for cycle in range(22):
            for rank in victims:
                group[rank].kill()
            group.all(survivors, "disconnect", list(victims))
            check(group, survivors, seed=cycle, count=1)
            now = group[0].call("free_memory")
            free = now if free is None else free
            assert abs(now - free) < 64 << 20, f"cycle {cycle}: {free} bytes were free, now {now}"
            list(pool.map(group.launch, victims))
            group.all(victims, "capture")
            for rank in victims:
                group[rank].send("join")
            group.all(survivors, "connect", list(victims))
            for rank in victims:
                group[rank].answer()
            check(group, ALL, seed=cycle, count=1)
