"""Hosts with links: news that is true and news that is not, and hosts that are silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from eep.membership import InstanceRecord, Life, News, Phase, RankReport, Report, coordination, host_of, phase_name
from tests.membership.sim.host import SimHost
from tests.membership.sim.links import HOST_TIMEOUT
from tests.membership.sim.schedule import Schedule
from tests.membership.sim.store_client import LEASE_TTL
from tests.membership.sim.world import NODES


def formed(hosts: int = 3, seed: int = 1) -> Schedule:
    schedule = Schedule(seed, hosts=hosts, per_host=2, linked=True)
    assert until(schedule, schedule.is_whole), "the instance did not form"
    assert not until(schedule, lambda: False, within=1.0)  # links come up
    return schedule


def until(schedule: Schedule, condition: Callable[[], object], within: float = 60.0) -> bool:
    def stop() -> bool:
        schedule.checked()
        return bool(condition())

    return schedule.world.run(schedule.world.now + within, stop)


def record(schedule: Schedule) -> InstanceRecord:
    assert schedule.instance is not None
    return schedule.instance


def run_linked() -> None:
    for seed in range(200):
        Schedule(seed, linked=True).run()


def bystanders(schedule: Schedule) -> list[SimHost]:
    """The hosts that do not coordinate."""
    coordinator = host_of(record(schedule).coordinator)
    return [host for host in schedule.world.hosts.values() if host.name != coordinator]


def test_a_death_ends_the_epoch_on_other_hosts_before_the_store_has_it() -> None:
    schedule = formed()
    own, other = bystanders(schedule)
    schedule.world.blocked |= {(own.name, node) for node in NODES}
    epoch, rank = record(schedule).view.epoch, min(own.state.ranks)
    own.crash(rank)
    assert until(schedule, lambda: other.state.revoked == epoch)
    assert record(schedule).view.epoch == epoch, "the store was faster"
    assert until(schedule, lambda: rank not in record(schedule).view.active), "the coordinator did not heed the news"
    schedule.world.blocked.clear()
    assert until(schedule, schedule.is_whole)


def test_what_a_host_says_of_the_ranks_of_others_is_not_believed() -> None:
    schedule = formed()
    liar = bystanders(schedule)[0]
    view = record(schedule).view
    assert liar.links is not None
    lies = {rank: view.incarnations[rank] for rank in view.active if rank not in liar.state.ranks}
    liar.links.say(News(liar.state.ident, lies, view.epoch + 7))
    liar.links.say(News("h9#1", lies, view.epoch))
    assert not until(schedule, lambda: record(schedule).view != view, within=10.0)
    assert all(host.state.revoked < view.epoch for host in schedule.world.hosts.values())


def test_news_of_lives_that_are_over_changes_nothing() -> None:
    schedule = formed()
    own = bystanders(schedule)[0]
    rank = min(own.state.ranks)
    own.crash(rank)
    assert until(schedule, schedule.is_whole)
    view = record(schedule).view
    assert own.links is not None
    own.links.say(News(own.state.ident, {rank: 0}, view.epoch - 1))
    assert not until(schedule, lambda: record(schedule).view != view, within=10.0)


@pytest.mark.parametrize("is_coordinator", [True, False])
def test_a_dead_host_is_out_before_its_lease_ends(is_coordinator: bool) -> None:
    schedule = formed()
    names = [host.name for host in bystanders(schedule)]
    lost = next(host for host in schedule.world.hosts.values() if (host.name not in names) == is_coordinator)
    died_at = schedule.world.now
    lost.kill()
    assert until(schedule, lambda: not set(lost.state.ranks) & set(record(schedule).view.active))
    assert schedule.world.now - died_at < LEASE_TTL - 1.0
    assert schedule.watchdog.hosts_lost == [lost.name]
    assert until(schedule, lambda: record(schedule).phase is Phase.RUN)
    schedule.start_host(lost.name, tuple(lost.state.ranks))
    assert until(schedule, schedule.is_whole)


def test_a_host_that_is_cut_off_stops_before_it_is_taken_for_lost() -> None:
    schedule = formed()
    cut = bystanders(schedule)[0]
    ends = [*NODES, *[name for name in schedule.world.hosts if name != cut.name]]
    schedule.world.blocked |= {(cut.name, end) for end in ends} | {(end, cut.name) for end in ends}
    assert until(schedule, lambda: phase_name(cut.state) == "REVOKED")
    assert schedule.watchdog.hosts_lost == []
    assert until(schedule, lambda: schedule.watchdog.hosts_lost == [cut.name])
    schedule.world.blocked.clear()
    assert until(schedule, schedule.is_whole)
    assert min(record(schedule).view.incarnations[rank] for rank in cut.state.ranks) > 0


@pytest.mark.parametrize("both_ways", [True, False])
def test_a_host_that_only_lost_a_link_is_not_taken_for_lost(both_ways: bool) -> None:
    """Its ranks still cannot exchange tokens with the other's, so one side is judged, as without links."""
    schedule = formed(hosts=2)
    schedule.world.blocked |= {("h0", "h1")} | ({("h1", "h0")} if both_ways else set())
    assert not until(schedule, lambda: schedule.watchdog.hosts_lost, within=10 * HOST_TIMEOUT)
    lives = record(schedule).view.incarnations[:4]
    assert sorted([lives[:2] == (0, 0), lives[2:] == (0, 0)]) == [False, True], "one side goes, and one stays"
    schedule.world.blocked.clear()
    assert until(schedule, schedule.is_whole)


def test_no_host_is_taken_for_lost_while_the_store_has_no_majority() -> None:
    schedule = formed()
    schedule.world.nodes_down.update(NODES)
    names = list(schedule.world.hosts)
    schedule.world.blocked |= {(one, other) for one in names for other in names if one != other}
    hosts = schedule.world.hosts.values()
    assert until(schedule, lambda: all(phase_name(host.state) == "REVOKED" for host in hosts))
    assert not until(schedule, lambda: schedule.watchdog.hosts_lost, within=5 * HOST_TIMEOUT)
    schedule.world.blocked.clear()
    schedule.world.nodes_down.clear()
    assert until(schedule, schedule.is_whole)
    assert schedule.watchdog.hosts_lost == []


def test_believing_every_news_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator can fail: a coordinator that believes a host about the ranks of others is found out."""

    def gullible(reports: Mapping[str, Report], known: Mapping[str, News]) -> Mapping[str, Report]:
        dead = {item for news in known.values() for item in news.dead.items()}
        return {
            host: replace(
                report,
                ranks={
                    rank: RankReport(Life.RESTING, told.incarnation) if (rank, told.incarnation) in dead else told
                    for rank, told in report.ranks.items()
                },
            )
            for host, report in reports.items()
        }

    monkeypatch.setattr(coordination, "brought_up_to_date", gullible)
    with pytest.raises(AssertionError, match=r"removed alive|does not return"):
        run_linked()


def test_relying_on_being_heard_for_too_long_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator can fail: a host that runs on until the others have given it up is found out."""
    monkeypatch.setattr("eep.membership.host_silence.RELIED_ON", 5.0)
    with pytest.raises(AssertionError, match="was taken for lost while"):
        run_linked()
