"""Ranks that share a GPU and wait for each other leave room on it for the work that they wait for."""

from __future__ import annotations

import dataclasses

import pytest

import eep
from tests.gpu.graph_ranks import GraphProgram
from tests.gpu.sharing_ranks import BusyProgram
from tests.gpu.test_graphs import ALL, CONFIG, check
from tests.ranks import Ranks

SHARED = dataclasses.replace(CONFIG, shares_gpu=True)


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("wire", ["f32", "bf16", "fp8"])
def test_few_blocks_that_wait_give_the_same_results(rendezvous: eep.Rendezvous, layout: str, wire: str) -> None:
    config = dataclasses.replace(SHARED, layout=layout, wire=wire, topk=6, max_tokens=40, max_ranks=5)
    with Ranks(rendezvous, config) as group:
        group.start(ALL)
        group.connect(ALL)
        group.check_steps(ALL, seed=17, count=4)


def test_products_in_clusters_find_room(rendezvous: eep.Rendezvous) -> None:
    """Without ``shares_gpu`` three of these ranks take 96 multiprocessors of an H200 while they wait, and a product that
    starts in clusters of eight does not begin before they give up."""
    config = dataclasses.replace(SHARED, max_tokens=64)
    with Ranks(rendezvous, config, timeout_ms=5000, program=BusyProgram) as group:
        group.start(ALL)
        group.connect(ALL)
        for seed in range(5):
            group.check_steps(ALL, seed=seed, count=1)


def test_a_rank_is_lost_while_few_blocks_wait(rendezvous: eep.Rendezvous) -> None:
    with Ranks(rendezvous, SHARED, timeout_ms=1000) as group:
        group.start(ALL)
        group.connect(ALL)
        group.check_steps(ALL, seed=1, count=3)
        group[2].kill()
        survivors = (0, 1, 3)
        for rank, (_, status) in group.all(survivors, "step", 2, ALL, 1).items():
            assert 2 in status.suspects, f"rank {rank}: {status}"
        group.all(survivors, "disconnect", [2])
        group.check_steps(survivors, seed=3, count=3)


def test_graphs_hold_kernels_of_which_few_blocks_wait(rendezvous: eep.Rendezvous) -> None:
    with Ranks(rendezvous, SHARED, timeout_ms=5000, program=GraphProgram) as group:
        group.start(ALL)
        group.all(ALL, "capture")
        group.all(ALL, "connect", list(ALL), epoch=2)
        group.all(ALL, "barrier")
        check(group, ALL, seed=0, count=50)
