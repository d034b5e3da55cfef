from __future__ import annotations

from eep.membership import Effect, LossCause, Notify, Phase, PhaseChanged, RankGone
from eep.observe.change_summary import OpenChange, add_to_change
from eep.view import NEVER, View

Timed = tuple[float, Effect]


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


def lines(effects: list[Timed]) -> list[str]:
    state, told = OpenChange(), []
    for now, effect in effects:
        state, line = add_to_change(state, effect, now)
        told += [line] if line is not None else []
    return told


START = change(0.0, (1.0, 0.5), 0, 0, 0, epoch=1)


def test_a_loss_and_a_rejoin_are_a_line_each() -> None:
    gone: Timed = (20.0, RankGone(2, 0, "it is dying"))
    lost, back = change(20.0, (0.005, 0.024), 0, 0, None, epoch=2), change(22.0, (0.0, 0.03), 0, 0, 1, epoch=3)
    start, first, second = lines([*START, gone, *lost, *back])
    assert start.startswith("ranks 0, 1, 2 joined: 1000 ms to agree, 500 ms to settle, 1500 ms in all")
    assert first == "rank 2 lost (exit): 5 ms to agree, 24 ms to settle, 29 ms in all; epoch 2, 2 ranks in"
    assert second == "rank 2 joined: 0 ms to agree, 30 ms to settle, 30 ms in all; epoch 3, 3 ranks in"


def test_what_ended_the_ranks_is_told_once_for_each_kind() -> None:
    gone: list[Timed] = [
        (20.0, RankGone(0, 0, "", kind=LossCause.STOPPED)),
        (20.0, RankGone(1, 0, "", asked_to_leave=True)),
        (20.0, RankGone(1, 7, "", kind=LossCause.LATE)),
    ]
    (_, line) = lines([*START, *gone, *change(20.0, (0.1, 20.0), None, None, 0, epoch=2)])
    assert line.startswith("ranks 0, 1 lost (left, stopped): 100 ms to agree, 20 s to settle")


def test_a_rank_that_is_replaced_within_one_change_is_lost_and_joins() -> None:
    gone: Timed = (20.0, RankGone(2, 0, ""))
    (_, line) = lines([*START, gone, *change(20.0, (0.1, 0.1), 0, 0, 1, epoch=2)])
    assert line.startswith("rank 2 lost (exit), rank 2 joined: ")


def test_an_epoch_that_ends_without_a_loss_is_told_too() -> None:
    (_, line) = lines([*START, *change(20.0, (0.1, 0.1), 0, 0, 0, epoch=2)])
    assert line.startswith("the epoch ended: ")
