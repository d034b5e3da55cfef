"""After a loss of all ranks, those that are back serve as soon as they suffice: one that hangs does not hold them up."""

from __future__ import annotations

from eep.membership import Effect, Exited, Phase, Ready, SetTimer, waiting_for
from eep.membership.events import Deadline, Timer
from tests.membership.membership_host import Host, of_type


def lost(**policy: float) -> Host:
    """A host whose four ranks ran, and were lost all at once. Their next lives are starting."""
    host = Host(**policy).run()
    for rank in range(4):
        host.feed(Exited(rank, 0, "SIGKILL"))
    assert host.instance.view.active == ()
    return host


def ready(host: Host, *ranks: int) -> list[Effect]:
    return host.feed(*(Ready(rank, host.state.ranks[rank].incarnation) for rank in ranks))


def test_ranks_that_suffice_wait_for_the_others_for_a_moment() -> None:
    host = lost(fewest_ranks=3, regroup_after=2.0)
    empty = host.state.epoch
    effects = ready(host, 0, 1, 3)
    assert SetTimer(Deadline(Timer.REGROUP, empty), 2.0) in of_type(effects, SetTimer)
    assert waiting_for(host.state) == "rank 2 to get ready, for a moment: those that are ready suffice"
    host.feed(Deadline(Timer.REGROUP, empty))
    assert host.instance.view.active == (0, 1, 3)


def test_the_one_that_was_late_joins() -> None:
    host = lost(fewest_ranks=3)
    ready(host, 0, 1, 3)
    host.feed(Deadline(Timer.REGROUP, host.state.epoch))
    host.settle()
    ready(host, 2)
    assert host.instance.view.active == (0, 1, 2, 3)


def test_all_four_need_not_wait() -> None:
    host = lost(fewest_ranks=3)
    ready(host, 0, 1, 2, 3)
    assert host.instance.view.active == (0, 1, 2, 3)
    assert host.instance.phase is Phase.AGREED


def test_too_few_ranks_wait() -> None:
    host = lost(fewest_ranks=3)
    effects = ready(host, 0, 1)
    assert not any(timer.deadline.timer is Timer.REGROUP for timer in effects if isinstance(timer, SetTimer))
    host.feed(Deadline(Timer.REGROUP, host.state.epoch))
    assert host.instance.view.active == ()


def test_a_rank_that_is_lost_while_the_others_wait_does_not_count() -> None:
    host = lost(fewest_ranks=3)
    ready(host, 0, 1, 3)
    host.feed(Exited(3, host.state.ranks[3].incarnation, "SIGKILL"))
    host.feed(Deadline(Timer.REGROUP, host.state.epoch))
    assert host.instance.view.active == ()


def test_where_it_is_not_known_how_many_suffice_all_are_awaited() -> None:
    host = lost()
    ready(host, 0, 1, 3)
    host.feed(Deadline(Timer.REGROUP, host.state.epoch))
    assert host.instance.view.active == ()
    assert waiting_for(host.state) == "rank 2 to get ready"


def test_a_new_instance_waits_for_its_first_view() -> None:
    host = Host(fewest_ranks=3)
    ready(host, 0, 1, 3)
    host.feed(Deadline(Timer.REGROUP, host.state.epoch))
    assert host.instance.view.active == ()


def test_ranks_that_could_serve_only_in_part_wait_for_those_that_make_them_enough() -> None:
    host = lost(fewest_ranks=1, enough_ranks=3, regroup_after=2.0, make_do_after=60.0)
    empty = host.state.epoch
    effects = ready(host, 3)
    assert SetTimer(Deadline(Timer.MAKE_DO, empty), 60.0) in of_type(effects, SetTimer)
    assert not any(timer.deadline.timer is Timer.REGROUP for timer in of_type(effects, SetTimer))
    assert (
        waiting_for(host.state)
        == "ranks 0, 1, 2 to get ready, for a while: those that are ready could serve only in part"
    )
    host.feed(Deadline(Timer.REGROUP, empty))
    assert host.instance.view.active == ()
    effects = ready(host, 0, 1)
    assert SetTimer(Deadline(Timer.REGROUP, empty), 2.0) in of_type(effects, SetTimer)
    host.feed(Deadline(Timer.REGROUP, empty))
    assert host.instance.view.active == (0, 1, 3)


def test_they_serve_in_part_when_the_others_do_not_come() -> None:
    host = lost(fewest_ranks=1, enough_ranks=3)
    ready(host, 3)
    host.feed(Deadline(Timer.MAKE_DO, host.state.epoch))
    assert host.instance.view.active == (3,)


def test_they_wait_for_a_rank_that_rests_after_a_failure() -> None:
    host = lost(fewest_ranks=1, enough_ranks=2, relaunch_limit=5)
    for rank in (0, 1, 2):
        host.feed(Exited(rank, host.state.ranks[rank].incarnation, "could not start"))
    ready(host, 3)
    assert host.instance.view.active == ()
    assert "could serve only in part" in waiting_for(host.state)


def test_they_do_not_wait_for_ranks_that_were_given_up() -> None:
    host = lost(fewest_ranks=1, enough_ranks=3, relaunch_limit=1)
    for rank in (0, 1, 2):
        host.feed(Exited(rank, host.state.ranks[rank].incarnation, "could not start"))
    ready(host, 3)
    assert host.instance.view.active == (3,)


def test_a_part_that_is_left_after_a_loss_serves_at_once() -> None:
    """Only a loss of all has ranks wait: those that are left have what their clients wait for."""
    host = Host(fewest_ranks=1, enough_ranks=3).run()
    host.feed(*(Exited(rank, 0, "SIGKILL") for rank in (0, 1, 2)))
    assert host.instance.view.active == (3,)
