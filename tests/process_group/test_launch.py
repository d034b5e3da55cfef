"""The launch of an instance: its ranks begin together, and none waits for one that has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import eep
from eep.data_plane.rendezvous import Rendezvous
from eep.process_group import agreement
from eep.process_group.agreement import Agreement
from eep.process_group.roster import LocalRoster
from eep.process_group.view_log import ViewLog
from eep.process_group.world import World
from eep.view import View
from tests.process_group.members import GroupConfig, MemberProgram, Members
from tests.process_group.worlds import CALL_S, SOON, Worlds, enter, together
from tests.ranks import CommandedProcess, RankProcess

Make = Callable[[int], Worlds]
Start = Callable[..., Members]


def test_a_rank_that_ends_right_after_its_launch_keeps_no_other_waiting(worlds: Make, tmp_path: Path) -> None:
    """It was in the first view, and the other had not reached it yet."""
    made = worlds(2)
    first, second = made.start(0), made.start(1)
    place = Rendezvous(tmp_path / "ranks")
    ViewLog(place.path).commit(View(1, (0, 1), (0, 0)))
    first.close()
    began = time.monotonic()
    with pytest.raises(eep.PeerUnreachable, match="rank 0 has ended"):
        Agreement(second, LocalRoster(second, place, temporary=False)).found(CALL_S)
    assert time.monotonic() - began < SOON.total_seconds()


@pytest.mark.parametrize("attempt", range(2))
def test_a_process_that_dies_right_after_its_launch_keeps_no_other_waiting(tmp_path: Path, attempt: int) -> None:
    """The other comes in and is told by its next call, or does not come in."""
    place = tmp_path / "ranks"
    place.mkdir(mode=0o700)
    with Members(place, GroupConfig(2), timeout_ms=600_000) as ranks:  # longer than an answer is waited for
        ranks.start(range(2))
        for rank in (0, 1):
            ranks[rank].send("start")
        ranks[0].answer()
        ranks[0].kill()
        with pytest.raises((eep.PeerUnreachable, eep.EpochRevoked), match=r"rank 0 has (ended|died)"):
            come_in_and_sum(ranks[1])


def come_in_and_sum(rank: RankProcess) -> None:
    rank.answer()
    rank.call("run", "all_reduce", 1)


def test_a_rank_that_ends_before_all_are_there_keeps_no_other_waiting(worlds: Make, tmp_path: Path) -> None:
    """There is no view yet, since rank 2 has not come."""
    made = worlds(3)
    first, second = made.start(0), made.start(1)
    outcome: list[Exception] = []

    def found() -> None:
        try:
            Agreement(second, LocalRoster(second, Rendezvous(tmp_path / "ranks"), temporary=False)).found(CALL_S)
        except eep.PeerUnreachable as error:
            outcome.append(error)

    waiting = threading.Thread(target=found, daemon=True)
    waiting.start()
    time.sleep(0.3)  # so that it has seen rank 0
    first.close()
    waiting.join(SOON.total_seconds())
    assert not waiting.is_alive()
    assert "rank 0 has ended" in str(outcome[0])


def test_the_last_rank_that_leaves_removes_no_newcomer(
    worlds: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has found that no rank is there, and another comes before all is removed."""
    last, place = worlds(1).start(0), Rendezvous(tmp_path / "ranks")
    newcomer = Rendezvous(place.path)
    claiming = threading.Thread(target=newcomer.claim, args=(0,), daemon=True)
    remove = place.remove

    def remove_while_one_comes() -> None:
        claiming.start()
        claiming.join(0.5)  # it must wait, or has come
        remove()

    monkeypatch.setattr(place, "remove", remove_while_one_comes)
    roster = LocalRoster(last, place, temporary=True)
    last.close()
    roster.close()
    claiming.join(SOON.total_seconds())
    assert list(newcomer.path.glob("r0.i*.lock")), "it is there, and what says so is gone"


def agreement_of(world: World, place: Path) -> Agreement:
    return Agreement(world, LocalRoster(world, Rendezvous(place), temporary=False))


class Launch:
    """Ranks that begin together. All but rank 0 come in when they are told to."""

    def __init__(self, several: list[World], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.several = several
        self.agreements = [agreement_of(world, place) for world in several]
        self.views: dict[int, View] = {}
        self._told = [threading.Event() for _ in several]
        self._told[0].set()
        for told, each in zip(self._told, self.agreements, strict=True):
            monkeypatch.setattr(each, "_enter_first", partial(self._enter, told, each._enter_first))
        self._threads = [
            threading.Thread(target=self._found, args=(rank,), daemon=True) for rank in range(len(several))
        ]
        for thread in self._threads:
            thread.start()
        self._threads[0].join(SOON.total_seconds())
        assert self.views.keys() == {0}

    def come_in(self, rank: int) -> None:
        self._told[rank].set()
        self._threads[rank].join(SOON.total_seconds())
        assert self.views[rank] == self.views[0]

    def _found(self, rank: int) -> None:
        self.views[rank] = self.agreements[rank].found(CALL_S)

    @staticmethod
    def _enter(told: threading.Event, enter_first: Callable[[View, float], View], view: View, end: float) -> View:
        told.wait(SOON.total_seconds())
        return enter_first(view, end)


def test_a_rank_that_leaves_right_after_its_launch_stays_until_the_others_have_come_in(
    worlds: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has sent would be lost otherwise: they would find a rank that has ended."""
    made = worlds(3)
    launch = Launch([made.start(rank) for rank in range(3)], tmp_path / "ranks", monkeypatch)

    def leave() -> None:
        launch.agreements[0].linger()
        launch.several[0].close()

    leaving = threading.Thread(target=leave, daemon=True)
    leaving.start()
    for rank in (1, 2):
        leaving.join(0.2)
        assert leaving.is_alive()
        launch.come_in(rank)
    leaving.join(SOON.total_seconds())
    assert not leaving.is_alive()


def test_a_rank_that_leaves_does_not_wait_for_ever(
    worlds: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = worlds(2)
    launch = Launch([made.start(rank) for rank in range(2)], tmp_path / "ranks", monkeypatch)
    monkeypatch.setattr("eep.process_group.agreement._LINGER_S", 0.2)
    together([launch.agreements[0].linger])
    launch.come_in(1)


def linger_for_ever(member: MemberProgram) -> None:
    agreement._LINGER_S = 3600.0


@pytest.mark.parametrize("fault", [CommandedProcess.kill, CommandedProcess.stop])
def test_a_rank_that_leaves_waits_for_none_that_has_ended_or_is_in_and_stands_still(
    group: Start, fault: Callable[[CommandedProcess], None]
) -> None:
    members = group(2)
    members.all(range(2), "do", linger_for_ever)
    members.all(range(2), "run", "barrier", 1)
    fault(members[1])
    members[0].call("destroy")


def test_a_rank_that_is_let_in_goes_on_without_a_member_that_has_ended_since(worlds: Make, tmp_path: Path) -> None:
    made = worlds(3)
    several = [made.start(rank) for rank in range(3)]
    several[2].start_alone()
    member, joiner = (agreement_of(several[rank], tmp_path / "ranks") for rank in (0, 2))
    enter(several[:2], ViewLog(tmp_path / "ranks").commit(View(1, (0, 1), (0, 0, -1))))
    ViewLog(tmp_path / "ranks").commit(View(2, (0, 1, 2), (0, 0, 0)))
    several[1].close()
    together([lambda: joiner.join(CALL_S), lambda: member.deactivate([1], CALL_S)])
    assert several[0].view == several[2].view == View(3, (0, 2), (0, 0, 0))


def test_a_rank_that_comes_late_is_waited_for(worlds: Make, tmp_path: Path) -> None:
    made = worlds(2)
    views: list[View] = []

    def start(rank: int) -> None:
        world = made.start(rank)
        views.append(
            Agreement(world, LocalRoster(world, Rendezvous(tmp_path / "ranks"), temporary=False)).found(CALL_S)
        )

    threads = [threading.Thread(target=start, args=(rank,), daemon=True) for rank in range(2)]
    threads[0].start()
    time.sleep(1.5)  # longer than rank 0 waits before it looks around
    threads[1].start()
    for thread in threads:
        thread.join(SOON.total_seconds())
    assert views == [View(1, (0, 1), (0, 0))] * 2
