from __future__ import annotations

from eep.membership import Effect, LossCause, Notify, Phase, PhaseChanged, RankGone
from eep.observe.change_summary import (
    ChangeReport,
    EndedChange,
    MovedTold,
    OpenChange,
    RepairTold,
    add_report,
    add_to_change,
    describe_open,
)
from eep.view import NEVER, View

Timed = tuple[float, Effect | ChangeReport]


def view(epoch: int, *lives: int | None) -> View:
    active = tuple(rank for rank, life in enumerate(lives) if life is not None)
    return View(epoch, active, tuple(NEVER if life is None else life for life in lives))


def change(now: float, took: tuple[float, float], *lives: int | None, epoch: int) -> list[Timed]:
    agreed, settled = took
    return [
        (now, PhaseChanged("REVOKED", epoch - 1)),
        (now + agreed, Notify(view(epoch, *lives), Phase.AGREED)),
        (now + agreed, PhaseChanged("AGREED", epoch)),
        (now + agreed + settled, Notify(view(epoch, *lives), Phase.RUN)),
        (now + agreed + settled, PhaseChanged("RUN", epoch)),
    ]


def ended(effects: list[Timed]) -> list[EndedChange]:
    state, told = OpenChange(), []
    for now, each in effects:
        if isinstance(each, ChangeReport):
            state = add_report(state, each)
            continue
        state, end = add_to_change(state, each, now)
        told += [end] if end is not None else []
    return told


def lines(effects: list[Timed]) -> list[str]:
    return [str(each) for each in ended(effects)]


START = change(0.0, (1.0, 0.5), 0, 0, 0, epoch=1)


def test_a_loss_and_a_rejoin_are_a_line_each() -> None:
    gone: Timed = (20.0, RankGone(2, 0, "it is dying"))
    lost, back = change(20.0, (0.005, 0.024), 0, 0, None, epoch=2), change(22.0, (0.0, 0.03), 0, 0, 1, epoch=3)
    start, first, second = lines([*START, gone, *lost, *back])
    assert start.startswith("ranks 0, 1, 2 joined: 1000 ms to agree, 500 ms repair, 1500 ms in all")
    assert first == "rank 2 lost (exit): 5 ms to agree, 24 ms repair, 29 ms in all; epoch 2, 2 ranks in"
    assert second == "rank 2 joined: 0 ms to agree, 30 ms repair, 30 ms in all; epoch 3, 3 ranks in"


def test_what_ended_the_ranks_is_told_once_for_each_kind() -> None:
    gone: list[Timed] = [
        (20.0, RankGone(0, 0, "", kind=LossCause.STOPPED)),
        (20.0, RankGone(1, 0, "", asked_to_leave=True, kind=LossCause.LEFT)),
        (20.0, RankGone(1, 7, "", kind=LossCause.LATE)),
    ]
    (_, line) = lines([*START, *gone, *change(20.0, (0.1, 20.0), None, None, 0, epoch=2)])
    assert line.startswith("ranks 0, 1 lost (left, stopped): 100 ms to agree, 20 s repair")


def test_ranks_that_were_asked_to_leave_are_not_called_lost() -> None:
    gone: Timed = (20.0, RankGone(2, 0, "", asked_to_leave=True, kind=LossCause.LEFT))
    (_, line) = lines([*START, gone, *change(20.0, (0.0, 0.1), 0, 0, None, epoch=2)])
    assert line.startswith("rank 2 left: 0 ms to agree")


def test_a_rank_that_is_replaced_within_one_change_is_lost_and_joins() -> None:
    gone: Timed = (20.0, RankGone(2, 0, ""))
    (_, line) = lines([*START, gone, *change(20.0, (0.1, 0.1), 0, 0, 1, epoch=2)])
    assert line.startswith("rank 2 lost (exit), rank 2 joined: ")


def test_an_epoch_that_ends_without_a_loss_is_told_too() -> None:
    (_, line) = lines([*START, *change(20.0, (0.1, 0.1), 0, 0, 0, epoch=2)])
    assert line.startswith("the epoch ended: ")


def test_what_was_brought_in_from_where_and_how_many_requests_moved_is_told() -> None:
    began, *middle, _, runs = change(20.0, (0.005, 0.024), 0, 0, None, epoch=2)
    told: list[Timed] = [
        (20.0, MovedTold(2, 0, 6)),
        (20.02, RepairTold(0, 2, 8, {"peer": 12 << 20, "disk": 0})),
        (20.02, RepairTold(1, 2, 4, {"peer": 6 << 20, "disk": 1 << 19})),
        (20.02, RepairTold(1, 1, 0, {"peer": 0})),
    ]
    gone: Timed = (20.0, RankGone(2, 0, "it is dying"))
    (_, end) = ended([*START, gone, began, *middle, *told, runs])
    assert str(end) == (
        "rank 2 lost (exit): 5 ms to agree, 24 ms repair (12 experts, 18.0 MiB from peer, 0.5 MiB from disk), "
        "6 requests moved, 29 ms in all; epoch 2, 2 ranks in"
    )
    assert end.fields() == {
        "epoch": 2,
        "active_ranks": 2,
        "lost": [2],
        "causes": ["exit"],
        "joined": [],
        "agree_ms": 5.0,
        "repair_ms": 24.0,
        "total_ms": 29.0,
        "experts": 12,
        "bytes": {"peer": 18 << 20, "disk": 1 << 19},
        "requests_moved": 6,
    }
    (*_, after) = ended([*START, gone, began, *middle, *told, runs, *change(22.0, (0.0, 0.03), 0, 0, 1, epoch=3)])
    assert (after.experts, after.moved) == (0, 0), "the next change begins with nothing"


def test_a_change_under_way_says_who_has_settled_and_what_has_come() -> None:
    state = OpenChange()
    for now, effect in START:
        assert isinstance(effect, Effect)
        state, _ = add_to_change(state, effect, now)
    assert describe_open(state, 30.0) is None
    for now, effect in change(20.0, (0.005, 0.0), 0, 0, None, epoch=2)[:3]:
        assert isinstance(effect, Effect)
        state, _ = add_to_change(state, effect, now)
    state = add_report(state, RepairTold(2, 1, 3, {"disk": 5}))  # of an epoch before
    state = add_report(add_report(state, RepairTold(1, 2, 4, {"disk": 7, "peer": 0})), MovedTold(2, 0, 6))
    assert describe_open(state, 20.5) == {
        "seconds": 0.5,
        "settled": [1],
        "experts": 7,
        "bytes": {"disk": 12},
        "requests_moved": 6,
    }
