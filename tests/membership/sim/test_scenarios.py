"""Stories told one at a time: who is lost, who decides, who stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from eep.membership import InstanceRecord, Phase, Policy, host_of, phase_name
from tests.membership.sim.schedule import POLICY, Schedule
from tests.membership.sim.world import NODES

IN_PART = replace(POLICY, fewest_ranks=1, enough_ranks=3, regroup_after=0.3, make_do_after=10.0, start_deadline=60.0)


def formed(hosts: int = 3, per_host: int = 2, seed: int = 1, policy: Policy = POLICY) -> Schedule:
    schedule = Schedule(seed, hosts=hosts, per_host=per_host, policy=policy)
    assert until(schedule, schedule.is_whole), "the instance did not form"
    return schedule


def until(schedule: Schedule, condition: Callable[[], bool], within: float = 60.0) -> bool:
    def stop() -> bool:
        schedule.checked()
        return condition()

    return schedule.world.run(schedule.world.now + within, stop)


def record(schedule: Schedule) -> InstanceRecord:
    assert schedule.instance is not None
    return schedule.instance


def is_out(schedule: Schedule, rank: int) -> bool:
    return rank not in record(schedule).view.active


def test_losing_rank_0_is_like_losing_any_other() -> None:
    schedule = formed(hosts=1, per_host=4)
    for rank in (0, 3):
        before = record(schedule).view
        schedule.world.hosts["h0"].crash(rank)
        assert until(schedule, partial(is_out, schedule, rank))
        assert record(schedule).view.epoch == before.epoch + 1
        assert until(schedule, schedule.is_whole)
        assert record(schedule).view.incarnations[rank] > before.incarnations[rank]


def test_one_host_goes_down_to_its_last_rank_and_still_runs() -> None:
    schedule = formed(hosts=1, per_host=4)
    host = schedule.world.hosts["h0"]
    host.launch_time = (1000.0, 1000.0)
    for rank in (0, 1, 2):
        host.crash(rank)
    assert until(schedule, lambda: host.processes[3].running and record(schedule).view.active == (3,))


def test_a_hung_rank_goes_alone_and_comes_back_as_another() -> None:
    schedule = formed(hosts=2, per_host=2)
    hung = schedule.world.hosts["h1"].processes[3]
    hung.pause()
    assert until(schedule, lambda: 3 not in record(schedule).view.active)
    assert not hung.alive, "it was removed before it was fenced"
    assert until(schedule, schedule.is_whole)
    assert record(schedule).view.active == (0, 1, 2, 3)
    assert record(schedule).view.incarnations[:3] == (0, 0, 0), "a bystander was removed"


def test_ranks_that_all_hang_at_once_are_replaced() -> None:
    schedule = formed(hosts=2, per_host=2)
    before = record(schedule).view
    hung = [process for host in schedule.world.hosts.values() for process in host.processes.values()]
    for process in hung:
        process.pause()
    assert until(schedule, lambda: not any(process.alive for process in hung)), "a rank that hangs was left alone"
    assert until(schedule, schedule.is_whole)
    assert record(schedule).view.active == before.active
    assert min(record(schedule).view.incarnations[:4]) > max(before.incarnations[:4])


@pytest.mark.parametrize("seed", range(50))
def test_a_part_of_the_ranks_waits_for_the_others_after_a_loss_of_all(seed: int) -> None:
    schedule = formed(hosts=1, per_host=4, seed=seed, policy=IN_PART)
    host, lost_at = schedule.world.hosts["h0"], schedule.world.now
    host.launch_time = (0.1, schedule.random.uniform(0.2, 15.0))
    for rank in range(4):
        host.crash(rank)
    assert until(schedule, lambda: not record(schedule).view.active)
    assert until(schedule, lambda: bool(record(schedule).view.active))
    waited = schedule.world.now - lost_at
    assert len(record(schedule).view.active) >= 3 or waited > IN_PART.make_do_after
    assert until(schedule, schedule.is_whole)


def test_a_part_of_the_ranks_makes_do_when_the_others_hang() -> None:
    schedule = formed(hosts=1, per_host=4, policy=IN_PART)
    host = schedule.world.hosts["h0"]
    for rank in range(4):
        host.crash(rank)
    assert until(schedule, lambda: len(schedule.watchdog.launched) == 8)
    for rank in (0, 1):
        host.processes[rank].pause()
    assert until(schedule, lambda: host.processes[2].running and record(schedule).view.active == (2, 3))


def test_losing_the_coordinator_is_like_losing_any_host() -> None:
    schedule = formed()
    lost = schedule.world.hosts[host_of(record(schedule).coordinator)]
    lost.kill()
    ranks = set(lost.state.ranks)
    assert until(schedule, lambda: not ranks & set(record(schedule).view.active))
    assert until(schedule, lambda: record(schedule).phase is Phase.RUN)
    assert host_of(record(schedule).coordinator) != lost.name
    schedule.start_host(lost.name, tuple(lost.state.ranks))
    assert until(schedule, schedule.is_whole)
    assert len(record(schedule).view.active) == 6


def test_a_side_without_the_store_stops_and_rejoins_as_new_incarnations() -> None:
    schedule = formed()
    cut = schedule.world.hosts["h2"]
    before = record(schedule).view
    schedule.world.blocked |= {(cut.name, node) for node in NODES} | {(node, cut.name) for node in NODES}
    assert until(schedule, lambda: phase_name(cut.state) == "REVOKED"), "the minority did not stop"
    assert not any(process.running for process in cut.processes.values())
    assert until(schedule, lambda: not set(cut.state.ranks) & set(record(schedule).view.active))
    assert until(schedule, lambda: record(schedule).phase is Phase.RUN), "the majority did not go on"
    schedule.world.blocked.clear()
    assert until(schedule, schedule.is_whole)
    for rank in cut.state.ranks:
        assert record(schedule).view.incarnations[rank] > before.incarnations[rank]


def test_a_store_that_is_away_for_a_while_costs_an_epoch_and_no_rank() -> None:
    schedule = formed()
    before = record(schedule).view
    schedule.world.nodes_down.update(NODES)
    hosts = schedule.world.hosts.values()
    assert until(schedule, lambda: all(phase_name(host.state) == "REVOKED" for host in hosts))
    assert not any(process.running for host in hosts for process in host.processes.values())
    schedule.world.nodes_down.clear()
    assert until(schedule, schedule.is_whole)
    assert record(schedule).view.incarnations == before.incarnations, "a rank was relaunched for nothing"
    assert record(schedule).view.epoch > before.epoch


def test_two_hosts_that_cannot_reach_each_other_do_not_both_go() -> None:
    schedule = formed(hosts=2, per_host=2)
    schedule.world.blocked |= {("h0", "h1"), ("h1", "h0")}
    assert until(schedule, lambda: len(record(schedule).view.active) < 4)
    assert record(schedule).view.active == (0, 1)


def test_a_second_fault_during_repair_restarts_at_a_higher_epoch() -> None:
    schedule = formed(hosts=1, per_host=4)
    host, first = schedule.world.hosts["h0"], record(schedule).view.epoch
    host.crash(1)
    assert until(schedule, lambda: record(schedule).view.epoch == first + 1)
    assert record(schedule).phase is Phase.AGREED
    host.crash(2)
    assert until(schedule, lambda: record(schedule).view.epoch >= first + 2)
    assert first + 1 not in schedule.watchdog.runs, "a view with a dead rank in it was run"
    assert until(schedule, schedule.is_whole)
