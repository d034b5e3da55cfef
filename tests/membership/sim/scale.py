"""What one view change costs in the simulator, for instances of any size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eep.membership import Phase
from tests.membership.sim.schedule import POLICY, Schedule

RANKS_PER_HOST = 8
PATIENCE = 300.0


@dataclass(frozen=True)
class Cost:
    hosts: int
    messages: int
    virtual_ms: float


def view_change_cost(ranks: int, *, linked: bool = False) -> Cost:
    """From the death of a rank until every host knows that the others run. Keeping leases alive is left out."""
    hosts = max(1, ranks // RANKS_PER_HOST)
    policy = replace(POLICY, max_ranks=ranks, start_deadline=1e6, settle_deadline=1e6)
    schedule = Schedule(ranks, hosts=hosts, per_host=ranks // hosts, policy=policy, linked=linked)
    world = schedule.world
    for host in world.hosts.values():
        host.launch_time = (0.1, 0.1)

    def formed() -> bool:
        instance = schedule.instance
        if instance is None or instance.phase is not Phase.RUN or len(instance.view.active) < ranks:
            return False
        return all(host.state.instance is instance for host in world.hosts.values())

    assert world.run(world.now + PATIENCE, formed), "the instance did not form"
    victim = world.hosts[f"h{hosts - 1}"]
    victim.launch_time = (1e9, 1e9)  # what follows is a removal and nothing else
    before, started, epoch = world.counts.copy(), world.now, victim.state.epoch
    victim.crash(ranks - 1)

    def over() -> bool:
        states = [host.state for host in world.hosts.values()]
        return all(s.instance is not None and s.epoch > epoch and s.instance.phase is Phase.RUN for s in states)

    assert world.run(world.now + PATIENCE, over), "the instance did not recover"
    counts = world.counts - before
    messages = sum(count for kind, count in counts.items() if kind not in ("keep-alive", "beat"))
    return Cost(hosts, messages, round((world.now - started) * 1e3, 1))
