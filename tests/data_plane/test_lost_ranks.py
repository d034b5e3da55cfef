"""Ranks that die, stop, wake up again or lie, as real processes. What a survivor trusts is always exact."""

from __future__ import annotations

import random
import time

import pytest

import eep
from eep import faults
from tests import moe
from tests.ranks import DIED, RankProcess, Ranks

ALL, VICTIM, SURVIVORS = (0, 1, 2, 3), 2, (0, 1, 3)
CONFIG = moe.Config(ranks=4, max_ranks=4)
SOON_MS, PATIENT_MS = 3000.0, 60_000.0
"""How long a rank waits where a peer is missed for certain, and everywhere else, where a loaded machine may be slow."""


@pytest.fixture
def group(rendezvous: eep.Rendezvous):  # noqa: ANN201
    with Ranks(rendezvous, CONFIG, timeout_ms=PATIENT_MS) as ranks:
        ranks.start(ALL)
        ranks.connect(ALL)
        yield ranks


def step_with_fault(group: Ranks, seed: int) -> dict[int, eep.Status]:
    """A step in which something goes wrong; whatever a survivor trusts nevertheless is compared."""
    statuses = {}
    group.all(ALL, "set_timeout", SOON_MS)
    for rank in ALL:
        group[rank].send("step", seed, ALL)
    for rank in SURVIVORS:
        outputs, statuses[rank] = group[rank].answer()
        group.check_outputs(rank, outputs, seed, ALL)
    group.all(SURVIVORS, "set_timeout", PATIENT_MS)
    return statuses


# Past these points the victim has done all that the others need of it in this step.
HARMLESS = ("combine.after_flags", "combine.mid_pull")


@pytest.mark.parametrize("point", [name for name in faults.points() if name.startswith(("dispatch.", "combine."))])
def test_kill_at_every_point(group: Ranks, point: str) -> None:
    group.check_steps(ALL, seed=1, count=2)
    addresses = group.all(SURVIVORS, "addresses")
    group[VICTIM].call("arm", point, "kill")
    statuses = step_with_fault(group, seed=10)
    assert group[VICTIM].answer() == DIED
    for rank, status in statuses.items():
        # With some flags sent and others not, those who got theirs may go on; the rest must know.
        if point in HARMLESS:
            assert status.ok, f"rank {rank}: {status}"
        elif "mid_flags" not in point:
            assert status.suspects == (VICTIM,), f"rank {rank}: {status}"
    if "mid_flags" in point:
        assert any(status.suspects for status in statuses.values())

    group.all(SURVIVORS, "disconnect", [VICTIM])
    group.check_steps(SURVIVORS, seed=20, count=3)
    group.replace(VICTIM, SURVIVORS)
    assert group[VICTIM].call("hello") == (VICTIM, 1)
    group.check_steps(ALL, seed=30, count=3)
    assert group.all(SURVIVORS, "addresses") == addresses


@pytest.mark.parametrize("point", ["dispatch.mid_rows", "combine.before_rows"])
def test_kill_in_the_expert_layout(rendezvous: eep.Rendezvous, point: str) -> None:
    config = moe.Config(ranks=4, max_ranks=4, layout="expert", wire="fp8")
    with Ranks(rendezvous, config, timeout_ms=PATIENT_MS) as group:
        group.start(ALL)
        group.connect(ALL)
        group[VICTIM].call("arm", point, "kill")
        assert any(status.suspects == (VICTIM,) for status in step_with_fault(group, seed=1).values())
        group.all(SURVIVORS, "disconnect", [VICTIM])
        group.check_steps(SURVIVORS, seed=5, count=2)
        group.replace(VICTIM, SURVIVORS)
        group.check_steps(ALL, seed=9, count=2)


def test_kills_at_random_moments(group: Ranks) -> None:
    """Five ranks die under load, whichever and whenever, rank 0 among them; each is replaced. All have steps behind them."""
    dice = random.Random(5)
    for cycle, victim in enumerate([0, 3, 1, 0, 2]):
        survivors = tuple(rank for rank in ALL if rank != victim)
        group.all(ALL, "set_timeout", SOON_MS)
        group.begin(ALL, "step", 100 * cycle, ALL, 10_000)
        time.sleep(dice.uniform(0.0, 0.15))  # not a wait for anything: the moment is what the dice are for
        group[victim].kill()
        for rank in survivors:
            outputs, status = group[rank].answer()
            assert victim in status.suspects
            group.check_outputs(rank, outputs, 100 * cycle, ALL)
        group.all(survivors, "set_timeout", PATIENT_MS)
        group.all(survivors, "disconnect", [victim])
        group.check_steps(survivors, seed=7)
        group.replace(victim, survivors)
        group.check_steps(ALL, seed=8)


def test_down_to_the_last_rank(group: Ranks) -> None:
    alive = list(ALL)
    for victim in (3, 0, 1):
        group[victim].kill()
        alive.remove(victim)
        group.all(alive, "disconnect", [victim])
        group.check_steps(alive, seed=victim, count=2)
    group.replace(0, [2])
    group.check_steps((0, 2), seed=50)


def test_a_stop_shorter_than_the_deadline_costs_nothing(group: Ranks) -> None:
    group[VICTIM].call("arm", "dispatch.after_rows", "stop")
    for rank in ALL:
        group[rank].send("step", 3, ALL)
    group[VICTIM].wait_until_stopped()
    group[VICTIM].resume()
    for rank in ALL:
        outputs, status = group[rank].answer()
        assert status.ok, status
        group.check_outputs(rank, outputs, 3, ALL)


@pytest.mark.parametrize(
    "point", ["dispatch.mid_rows", "dispatch.after_rows", "combine.after_rows", "combine.mid_pull"]
)
def test_a_removed_rank_that_wakes_up_reaches_no_rank(group: Ranks, point: str) -> None:
    group[VICTIM].call("arm", point, "stop")
    step_with_fault(group, seed=1)
    group[VICTIM].wait_until_stopped()
    group.all(SURVIVORS, "disconnect", [VICTIM])
    zombie = group[VICTIM]
    group.replace(VICTIM, SURVIVORS, incarnation=1)
    # It goes on exactly where it was, in the middle of the exchange of the others.
    for rank in ALL:
        group[rank].send("step", 40, ALL, 200)
    zombie.resume()
    for rank in ALL:
        outputs, status = group[rank].answer()
        assert status.ok, f"rank {rank}: {status}"
        assert len(outputs) == 200
        group.check_outputs(rank, outputs[:5], 40, ALL)
    outputs, status = zombie.answer()
    # If it had all it needed before it was stopped, what it trusts is still right; then it is told.
    group.check_outputs(VICTIM, outputs, 1, ALL)
    assert outputs or not status.ok
    with pytest.raises(eep.RankRemoved, match="only as a new incarnation"):
        zombie.call("apply", group[0].call("connect", [0]))


def test_an_incarnation_waits_for_the_end_of_the_one_whose_inbox_it_gets(group: Ranks) -> None:
    group[VICTIM].stop()
    group.launch(VICTIM, incarnation=1).kill()
    with pytest.raises(eep.RankInUse, match="could still write"):
        group.launch(VICTIM, incarnation=2)
    group.past[0].kill()
    assert group.launch(VICTIM, incarnation=2).call("hello") == (VICTIM, 2)


def test_a_suspect_is_waited_for_once(group: Ranks) -> None:
    group[VICTIM].kill()
    group.all(SURVIVORS, "set_timeout", SOON_MS)
    counts, status = group.all(SURVIVORS, "dispatch_only", 1, ALL)[0]
    assert status.suspects == (VICTIM,)
    assert counts[VICTIM] == 0
    # With a deadline of a quarter of an hour, a second wait for it would be seen.
    group.all(SURVIVORS, "set_timeout", 900_000)
    for answer in group.all(SURVIVORS, "finish_step").values():
        assert answer.suspects == (VICTIM,)
    for _, status in group.all(SURVIVORS, "step", 5, ALL).values():
        assert status.suspects == (VICTIM,)


def test_a_revoke_frees_every_rank_at_once(group: Ranks) -> None:
    group.all(ALL, "set_timeout", 900_000)
    for rank in (0, 1):
        group[rank].send("step", 1, ALL)
    group[3].call("revoke")
    for rank in (0, 1):
        outputs, status = group[rank].answer()
        assert not outputs
        assert status.revoked
    assert group[VICTIM].call("status").revoked
    # The revoked epoch stays over; the next one is fresh.
    assert group[0].call("step", 2, ALL)[1].revoked
    group.all(ALL, "connect", list(ALL), epoch=2)
    group.check_steps(ALL, seed=9)


def test_a_new_view_at_the_same_moment_everywhere(group: Ranks) -> None:
    group.check_steps(ALL, seed=1)
    view = eep.View(7, (0, 1, 3), (0, 0, 0, 0))
    assert group.all(SURVIVORS, "apply", view)[0] == view
    with pytest.raises(eep.RankRemoved):
        group[VICTIM].call("apply", view)
    with pytest.raises(eep.EpochRevoked, match="not part of its own view"):
        group[VICTIM].call("step", 1, ALL)
    group.check_steps(SURVIVORS, seed=2)


@pytest.mark.parametrize("point", [name for name in faults.LOSABLE if name in faults.kernel_points()])
def test_a_message_that_is_lost_is_missed_by_all_but_its_sender(group: Ranks, point: str) -> None:
    group.check_steps(ALL, seed=1)
    group[VICTIM].call("arm", point, "drop")
    for status in step_with_fault(group, seed=10).values():
        assert status.suspects == (VICTIM,)
    outputs, _ = group[VICTIM].answer()
    group.check_outputs(VICTIM, outputs, 10, ALL)
    # Only that message was lost: in the next epoch it is one of them.
    group[VICTIM].call("set_timeout", PATIENT_MS)
    group.all(ALL, "connect", list(ALL), epoch=2)
    group.check_steps(ALL, seed=20, count=2)


# ---- peers that lie ----


def test_garbage_in_flag_words_is_not_taken_for_a_message(group: Ranks) -> None:
    for seed in range(20):
        for rank in ALL:
            group[rank].call("scribble_flags", seed)
        group.check_steps(ALL, seed=seed)
    group[VICTIM].kill()
    group[0].call("scribble_flags", 99)
    group.all(SURVIVORS, "set_timeout", SOON_MS)
    assert group.all(SURVIVORS, "dispatch_only", 1, ALL)[0][1].suspects == (VICTIM,)


@pytest.mark.parametrize(
    "message",
    [
        {"count": CONFIG.max_tokens + 1, "topk_idx": 0},
        {"count": 65535, "topk_idx": 0},
        {"count": 1, "topk_idx": CONFIG.local_experts},
        {"count": 1, "topk_idx": -2},
        {"count": 1, "topk_idx": 2**31 - 1},
        {"count": 1, "topk_idx": 0, "envelope": 12345},
    ],
)
def test_a_message_that_cannot_be_is_dropped_whole(group: Ranks, message: dict[str, int]) -> None:
    group[VICTIM].call("send_message", 0, **message)
    group.all(SURVIVORS, "set_timeout", SOON_MS)
    for rank in SURVIVORS:
        group[rank].send("dispatch_only", 1, ALL)
    counts, status = group[0].answer()
    assert status.corrupt == (VICTIM,)
    assert counts[VICTIM] == 0
    for rank in (1, 3):
        assert group[rank].answer()[1].suspects == (VICTIM,)
    group.all(SURVIVORS, "set_timeout", PATIENT_MS)
    group.all(SURVIVORS, "disconnect", [VICTIM])
    group.check_steps(SURVIVORS, seed=2)


@pytest.mark.parametrize(("field", "value"), [("region", 0), ("control", 0), ("slot", 4_000_000), ("incarnation", 77)])
def test_a_table_that_was_scribbled_over_costs_a_peer(group: Ranks, field: str, value: int) -> None:
    group[0].call("scribble_table", VICTIM, field, value)
    group.all(ALL, "set_timeout", SOON_MS)
    for rank in ALL:
        group[rank].send("step", 1, ALL)
    outputs, status = group[0].answer()
    assert status.bad_table
    assert not outputs
    assert not group[VICTIM].answer()[1].ok
    for rank in (1, 3):
        outputs, _ = group[rank].answer()
        group.check_outputs(rank, outputs, 1, ALL)


def test_a_token_for_an_expert_outside_the_view_is_noticed(group: Ranks) -> None:
    group.all(SURVIVORS, "disconnect", [VICTIM])
    for _, status in group.all(SURVIVORS, "step", 1, ALL).values():
        assert status.misrouted


# ---- over and over ----


def test_ten_cycles_of_kill_and_rejoin_leak_nothing(group: Ranks) -> None:
    memories = group.all(SURVIVORS, "memories")
    for cycle in range(10):
        group[VICTIM].kill()
        group.all(SURVIVORS, "disconnect", [VICTIM])
        group.check_steps(SURVIVORS, seed=cycle)
        group.replace(VICTIM, SURVIVORS)
        assert group[VICTIM].call("hello") == (VICTIM, cycle + 1)
        group.check_steps(ALL, seed=cycle)
        assert group.all(SURVIVORS, "memories") == memories


def test_a_joiner_that_dies_leaves_the_survivors_as_they_were(group: Ranks) -> None:
    group[VICTIM].kill()
    view = group.all(SURVIVORS, "disconnect", [VICTIM])[0]
    group.launch(VICTIM).kill()
    with pytest.raises(eep.PeerUnreachable):
        group[0].call("connect", [VICTIM], timeout=0.2)
    assert group[0].call("view") == view
    group.check_steps(SURVIVORS, seed=3)
    group.replace(VICTIM, SURVIVORS)
    group.check_steps(ALL, seed=4)


def test_several_join_at_once(group: Ranks) -> None:
    for rank in (1, 2, 3):
        group[rank].kill()
    group[0].call("disconnect", [1, 2, 3])
    for rank in (1, 2, 3):
        group.launch(rank).call("warm_up")
        group[rank].send("join")
    group[0].call("connect", [1, 2, 3])
    assert len({group[rank].answer() for rank in (1, 2, 3)}) == 1
    group.check_steps(ALL, seed=70, count=2)


def joiner_that_has_mapped_the_others(group: Ranks) -> tuple[RankProcess, eep.View]:
    """In the place of the victim, not let in yet; and the view of those who will."""
    memories = group[VICTIM].call("memories")
    group[VICTIM].kill()
    view = group.all(SURVIVORS, "disconnect", [VICTIM])[0]
    joiner = group.launch(VICTIM)
    for _ in range(10):  # it passes by a rank that does not answer at once
        joiner.call("prepare")
        if joiner.call("memories") == memories:
            return joiner, view
    raise AssertionError("not all of the others could be mapped")


def test_a_joiner_that_has_mapped_the_others_needs_nothing_more_of_them(group: Ranks) -> None:
    memories = group[0].call("memories")
    joiner, view = joiner_that_has_mapped_the_others(group)
    view = view.joined_by({VICTIM: joiner.call("hello")[1]})
    for rank in SURVIVORS:
        group[rank].stop()
        group[rank].wait_until_stopped()
    assert joiner.call("apply", view, timeout=0.0) == view
    for rank in SURVIVORS:
        group[rank].resume()
    group.all(SURVIVORS, "apply", view)
    group.check_steps(ALL, seed=80)
    assert set(group.all(ALL, "memories").values()) == {memories}


def test_what_was_mapped_of_a_life_that_has_ended_since_is_not_used(group: Ranks) -> None:
    memories = group[0].call("memories")
    joiner, view = joiner_that_has_mapped_the_others(group)
    group[0].kill()
    second = group.launch(0)
    view = view.joined_by({0: second.call("hello")[1], VICTIM: joiner.call("hello")[1]})
    group.all(ALL, "apply", view)
    group.check_steps(ALL, seed=81)
    assert set(group.all(ALL, "memories").values()) == {memories}


def test_what_a_view_that_could_not_be_applied_had_mapped_is_let_go_with_the_next(group: Ranks) -> None:
    for rank in (VICTIM, 3):
        group[rank].kill()
    view = group.all([0, 1], "disconnect", [VICTIM, 3])[0]
    memories = group.all([0, 1], "memories")
    life = group.launch(VICTIM).call("hello")[1]
    for rank in (0, 1):
        with pytest.raises(eep.PeerUnreachable):
            group[rank].call("apply", view.joined_by({VICTIM: life, 3: 7}), timeout=0.1)  # no such life of rank 3
    assert group.all([0, 1], "memories") != memories, "the victim is mapped, and kept for another try"
    assert set(group.all([0, 1], "view").values()) == {view}
    group.all([0, 1], "apply", eep.View(view.epoch + 1, view.active, view.incarnations))
    assert group.all([0, 1], "memories") == memories
    group.check_steps([0, 1], seed=82)
