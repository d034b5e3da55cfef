"""Collectives of process groups on CUDA tensors between processes that share a GPU, against plain torch, bit for bit."""

from __future__ import annotations

import time

import pytest

import eep
from tests.gpu.lane_ranks import LaneConfig, LaneProgram
from tests.ranks import Ranks

ALL, VICTIM, SURVIVORS = (0, 1, 2, 3), 2, (0, 1, 3)


def ranks_of(rendezvous: eep.Rendezvous, config: LaneConfig, timeout_ms: float = 60_000) -> Ranks:
    return Ranks(rendezvous, config, timeout_ms, LaneProgram)  # type: ignore[arg-type]


def start(group: Ranks, ranks: tuple[int, ...] = ALL) -> Ranks:
    group.start(ranks)
    group.connect(ranks)
    return group


def check(group: Ranks, ranks: tuple[int, ...], method: str, *args: object) -> None:
    for rank, answer in group.all(ranks, method, *args).items():
        status = answer if isinstance(answer, eep.Status) else answer[1]
        assert status.ok, f"rank {rank}: {status}"


def test_every_collective_matches_torch(rendezvous: eep.Rendezvous) -> None:
    """Sizes from nothing over one block to many rounds, every type, aligned and not."""
    with ranks_of(rendezvous, LaneConfig()) as group:
        start(group)
        for seed, count in enumerate([0, 1, 7, 1000, 40_001, 600_000]):
            check(group, ALL, "run", seed, ALL, count, "float32", seed % 2)
        for dtype in ("bfloat16", "float16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"):
            for offset in (0, 1):
                check(group, ALL, "run", 20, ALL, 3001, dtype, offset)
        check(group, ALL, "run", 21, ALL, 200_000, "bfloat16")


def test_two_and_eight_ranks_in_collectives(rendezvous: eep.Rendezvous) -> None:
    with ranks_of(rendezvous, LaneConfig(max_ranks=8)) as group:
        group.start(range(8))
        group.connect((0, 1))
        check(group, (0, 1), "run", 1, (0, 1), 5000, "float32")
        all_ranks = tuple(range(8))
        group.all((0, 1), "connect", list(all_ranks), epoch=2)
        group.all(range(2, 8), "connect", list(all_ranks), epoch=2)
        check(group, all_ranks, "run", 2, all_ranks, 5000, "float32")
        check(group, all_ranks, "repeat", 3, all_ranks, 100_000, 5)


def test_a_thousand_replays_of_one_graph_of_collectives(rendezvous: eep.Rendezvous) -> None:
    """Ranks die, go, come and are replaced under it; no rank captures again."""
    with ranks_of(rendezvous, LaneConfig(), timeout_ms=1000) as group:
        group.start(ALL)
        group.all(ALL, "capture")
        group.all(ALL, "connect", list(ALL), epoch=2)
        group.all(ALL, "barrier")
        check(group, ALL, "replay", 0, ALL, 300)

        group.begin(ALL, "replay", 1000, ALL, 100_000)
        group[VICTIM].kill()
        for rank in SURVIVORS:
            done, status = group[rank].answer()
            assert VICTIM in status.suspects
            assert done > 0
        group.all(SURVIVORS, "disconnect", [VICTIM])
        check(group, SURVIVORS, "replay", 2000, SURVIVORS, 200)

        newcomer = group.launch(VICTIM)
        newcomer.call("capture")
        newcomer.send("join")
        group.all(SURVIVORS, "connect", [VICTIM])
        newcomer.answer()
        check(group, ALL, "replay", 3000, ALL, 300)

        group.all((1, 2, 3), "disconnect", [0])
        check(group, (1, 2, 3), "replay", 4000, (1, 2, 3), 200)


def test_views_change_without_a_pause(rendezvous: eep.Rendezvous) -> None:
    """Nothing holds the ranks together but the calls themselves: a fast one is in the next view while a slow one reads."""
    with ranks_of(rendezvous, LaneConfig()) as group:
        start(group)
        for seed in range(20):
            for rank in ALL:
                group[rank].send("repeat", seed, ALL, 30_000, 1 + seed % 2)
                group[rank].send("connect", [])
            for rank in ALL:
                assert group[rank].answer()[1].ok
                group[rank].answer()


def test_what_went_on_without_a_rank_is_not_taken_by_it_for_whole(rendezvous: eep.Rendezvous) -> None:
    """A rank waits in the second round of a sum that the others finished without it, when they come from the next view.

    What they left there has the number that it waits for, and it lacks its part; of that it was told nothing.
    """
    with ranks_of(rendezvous, LaneConfig(), timeout_ms=900_000) as group:
        start(group)
        check(group, ALL, "repeat", 1, ALL, 200_000, 2)
        group.all(SURVIVORS, "suspect", VICTIM)
        for _, status in group.all(SURVIVORS, "repeat", 5, ALL, 200_000, 1).values():
            assert status.suspects == (VICTIM,)
        group[VICTIM].send("repeat", 5, ALL, 200_000, 1)
        time.sleep(0.3)  # so that it is there already; if it is not, it finds the same out in its first round
        for rank in SURVIVORS:
            group[rank].send("connect", [])
            group[rank].send("repeat", 6, ALL, 200_000, 3)
        done, status = group[VICTIM].answer()
        assert done == 0
        assert status.revoked
        assert not status.suspects
        group[VICTIM].send("connect", [])
        group[VICTIM].send("repeat", 6, ALL, 200_000, 3)
        for rank in ALL:
            group[rank].answer()
            done, status = group[rank].answer()
            assert status.ok, f"rank {rank}: {status}"
            assert done == 3


def test_a_lane_taken_again_holds_nothing_of_the_group_before(rendezvous: eep.Rendezvous) -> None:
    """Not even for a rank that waits in a view that the others left without a call."""
    with ranks_of(rendezvous, LaneConfig(), timeout_ms=900_000) as group:
        start(group)
        group.all(ALL, "open_another", 500, [*ALL], 1000)
        group[VICTIM].send("sum_in_other", 1, [*ALL], 1000)
        for rank in SURVIVORS:
            group[rank].send("connect", [])
            group[rank].send("sum_in_other", 2, [*ALL], 1000)
        assert group[VICTIM].answer().revoked
        group[VICTIM].send("connect", [])
        group[VICTIM].send("sum_in_other", 2, [*ALL], 1000)
        for rank in ALL:
            group[rank].answer()
            assert group[rank].answer().ok


def test_a_killed_rank_is_dropped(rendezvous: eep.Rendezvous) -> None:
    with ranks_of(rendezvous, LaneConfig(), timeout_ms=1000) as group:
        start(group)
        group.begin(ALL, "repeat", 1, ALL, 200_000, 100_000)
        group[VICTIM].kill()
        for rank in SURVIVORS:
            assert VICTIM in group[rank].answer()[1].suspects
        group.all(SURVIVORS, "disconnect", [VICTIM])
        check(group, SURVIVORS, "run", 2, SURVIVORS, 3000, "float32")
        group.replace(VICTIM, SURVIVORS)
        check(group, ALL, "run", 3, ALL, 3000, "float32")


def test_a_revoke_frees_a_spinning_collective(rendezvous: eep.Rendezvous) -> None:
    with ranks_of(rendezvous, LaneConfig(), timeout_ms=900_000) as group:
        start(group)
        before = group[3].call("signals_of", (0, 1))
        for rank in (0, 1):
            group[rank].send("repeat", 1, ALL, 200_000, 1)
        group[3].call("wait_for_signals", before)
        group[3].call("revoke")
        for rank in (0, 1):
            assert group[rank].answer()[1].revoked
        group.all(ALL, "connect", [], epoch=2)
        check(group, ALL, "run", 2, ALL, 3000, "float32")


def test_a_stopped_rank_that_wakes_up_spoils_no_collective(rendezvous: eep.Rendezvous) -> None:
    # A fifth rank's worth of room: when it wakes up, its kernels too spin on the GPU that all share.
    with ranks_of(rendezvous, LaneConfig(max_ranks=5), timeout_ms=1000) as group:
        start(group)
        group.begin(ALL, "repeat", 1, ALL, 200_000, 100_000)
        zombie = group[VICTIM]
        zombie.stop()
        for rank in SURVIVORS:
            assert VICTIM in group[rank].answer()[1].suspects
        group.all(SURVIVORS, "disconnect", [VICTIM])
        group.replace(VICTIM, SURVIVORS, incarnation=1)
        for rank in ALL:
            group[rank].send("repeat", 40, ALL, 50_000, 200)
        zombie.resume()
        for rank in ALL:
            done, status = group[rank].answer()
            assert status.ok, f"rank {rank}: {status}"
            assert done == 200
        assert not zombie.answer()[1].ok


@pytest.mark.parametrize("other", [("ALL_GATHER", 50_000), ("ALL_REDUCE", 100)])
def test_different_calls_are_noticed(rendezvous: eep.Rendezvous, other: tuple[str, int]) -> None:
    """At once, not at the deadline, and no rank is suspected."""
    with ranks_of(rendezvous, LaneConfig(), timeout_ms=900_000) as group:
        start(group)
        for rank in ALL:
            group[rank].send("differ", *(other if rank == 1 else ("ALL_REDUCE", 50_000)))
        for rank in ALL:
            status = group[rank].answer()
            assert status.mismatched
            assert not status.suspects
        group.all(ALL, "connect", [])
        check(group, ALL, "run", 2, ALL, 3000, "float32")


def test_groups_come_and_go_in_any_order(rendezvous: eep.Rendezvous) -> None:
    with ranks_of(rendezvous, LaneConfig()) as group:
        start(group)
        for identity in range(1, 7):
            for rank, partner in ((0, 2), (1, 3)):
                for member in (rank, partner):
                    group[member].send("group", 10 * identity + rank, [partner, rank], 20_000)
            for rank in ALL:
                assert group[rank].answer().ok
        for rank in reversed(ALL):  # the first to come waits for the last to open the group
            group[rank].send("group", 1000, [1, 3, 0, 2], 70_000)
            time.sleep(0.05)  # not a wait for anything: so far apart they come
        for rank in ALL:
            assert group[rank].answer().ok
        check(group, ALL, "run", 2, ALL, 3000, "float32")


def test_bad_calls_are_refused(rendezvous: eep.Rendezvous) -> None:
    with ranks_of(rendezvous, LaneConfig()) as group:
        start(group, (0,))
        said = group[0].call("refused")
        assert len(said) == 7
        for word, sentence in zip(
            ["not reduced", "bitwise", "whole number", "no address", "root", "no group", "CPUs"], said, strict=True
        ):
            assert word in sentence
        check(group, (0,), "run", 2, (0,), 3000, "float32")


def test_too_many_parts_are_refused(rendezvous: eep.Rendezvous) -> None:
    with ranks_of(rendezvous, LaneConfig(parts=64)) as group, pytest.raises(ValueError, match="lane_parts"):
        group.start((0,))
