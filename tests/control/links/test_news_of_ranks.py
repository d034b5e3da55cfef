"""Real supervisors and real ranks: what one host sees reaches the other over their link."""

from __future__ import annotations

import asyncio

from eep.control.supervisor.supervisor import Supervisor
from eep.membership import Effect, Revoke, host_of
from tests.control.harness import kill, record, runs_with, until
from tests.control.links.linked_hosts import linked_hosts

ALL = (0, 1, 2, 3)


def revokes_of(host: Supervisor) -> list[str]:
    reasons: list[str] = []

    def note(effect: Effect) -> None:
        if isinstance(effect, Revoke):
            reasons.append(effect.reason)

    host.watch_effects(note)
    return reasons


async def until_linked(hosts: list[Supervisor]) -> None:
    for host in hosts:
        await until(host, runs_with(host, ALL))
    async with asyncio.timeout(60):
        while not all(host._others.status() and all((host._others.status() or {}).values()) for host in hosts):
            await asyncio.sleep(0.01)


def test_a_death_is_known_on_the_other_host_before_the_view_without_the_rank() -> None:
    async def body() -> None:
        async with linked_hosts() as (hosts, _):
            await until_linked(hosts)
            coordinator = host_of(record(hosts[0]).coordinator)
            other = next(host for host in hosts if host_of(host.ident) != coordinator)
            own = next(host for host in hosts if host is not other)
            reasons, rank = revokes_of(other), min(own.pids)
            epoch = record(other).view.epoch
            kill(own, rank)
            await until(other, lambda: record(other).view.epoch > epoch)
            assert reasons[0].endswith(f"says that rank {rank} (incarnation 0) is dead")
            for host in hosts:
                await until(host, runs_with(host, ALL))

    asyncio.run(body())


def test_the_coordinator_decides_on_news_without_the_report() -> None:
    """The report of the other host never comes to the store, and the rank is out all the same."""

    async def body() -> None:
        async with linked_hosts() as (hosts, _):
            await until_linked(hosts)
            name = host_of(record(hosts[0]).coordinator)
            coordinator = next(host for host in hosts if host_of(host.ident) == name)
            other = next(host for host in hosts if host is not coordinator)
            other._driver.publish = lambda report: None  # type: ignore[method-assign]
            rank = min(other.pids)
            kill(other, rank)
            await until(coordinator, lambda: rank not in record(coordinator).view.active)

    asyncio.run(body())
