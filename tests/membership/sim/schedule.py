"""One seeded run: hosts come up, faults strike for a while, then everything heals and the instance must run again."""

from __future__ import annotations

import random
from collections.abc import Callable

from eep.control.store.record_codec import INSTANCE_KEY
from eep.membership import Action, InstanceRecord, Leave, News, OperatorAsked, Phase, Policy, RankStatus
from tests.membership.sim.host import SimHost
from tests.membership.sim.invariants import Watchdog
from tests.membership.sim.world import NODES, World

POLICY = Policy(
    max_ranks=12,
    fewest_ranks=1,
    enough_ranks=2,
    judge_after=0.2,
    regroup_after=0.3,
    make_do_after=2.0,
    start_deadline=5.0,
    settle_deadline=3.0,
    stall_deadline=5.0,  # a rank that waits for a peer complains within two
    fence_deadline=1.0,
    leave_grace=0.5,
    relaunch_backoff=0.1,
    longest_backoff=2.0,
    relaunch_limit=10_000,
    stable_after=5.0,
)
FAULTS_FOR = 20.0
HEALS_WITHIN = 120.0


class Schedule:
    def __init__(
        self,
        seed: int,
        *,
        hosts: int | None = None,
        per_host: int | None = None,
        policy: Policy = POLICY,
        linked: bool | None = None,
    ) -> None:
        """``linked``: whether hosts have links; None: with some seeds."""
        self._linked = seed % 20 == 12 if linked is None else linked
        self.world = World(seed)
        self.random: random.Random = self.world.random
        self.watchdog = Watchdog(self.world, policy)
        hosts = hosts or self.random.choice((1, 2, 3, 3))
        per_host = per_host or self.random.choice((1, 2, 3))
        self.policy = policy
        self._lives = 0
        self._undone: list[Callable[[], None]] = []
        for index in range(hosts):
            ranks = tuple(range(index * per_host, (index + 1) * per_host))
            self.start_host(f"h{index}", ranks)

    def start_host(self, name: str, ranks: tuple[int, ...]) -> SimHost:
        self._lives += 1
        host = SimHost(self.world, name, f"{name}#{self._lives}", ranks, self.policy, linked=self._linked)
        host.on_launch, host.on_stalled = self.watchdog.launch, self.watchdog.stalled
        return host

    @property
    def instance(self) -> InstanceRecord | None:
        entry = self.world.store.get(INSTANCE_KEY)
        return entry.value if entry else None

    # Faults.

    def run(self) -> None:
        """Faults for a while, checked after every event; then liveness."""
        self.world.loss = self.random.choice((0.0, 0.0, 0.02, 0.1))
        self.world.duplication = self.random.choice((0.0, 0.1))
        when = self.random.uniform(0.0, 3.0)
        while when < FAULTS_FOR:
            self.world.at(when, self.strike)
            when += self.random.expovariate(1 / 2.0)
        self.world.run(FAULTS_FOR, self.checked)
        self.heal()
        recovered = self.world.run(self.world.now + HEALS_WITHIN, self.is_whole)
        assert recovered, f"faults have stopped, but the instance does not return to RUN: {self.instance}"

    def checked(self) -> bool:
        self.world.expire_leases()
        self.watchdog.check_running()
        self.watchdog.check_standing()
        return False

    def is_whole(self) -> bool:
        """Every rank that is wanted is in, every host knows it, and all of them run."""
        self.checked()
        instance = self.instance
        if instance is None or instance.phase is not Phase.RUN:
            return False
        for host in self.world.hosts.values():
            if host.state.instance != instance:
                return False
            for rank, local in host.state.ranks.items():
                wanted = local.keep and local.status is not RankStatus.DOWN
                if wanted and not (instance.has(rank, local.incarnation) and host.processes[rank].running):
                    return False
        return True

    def strike(self) -> None:
        faults = [
            (8, self._crash_rank),
            (4, self._pause_rank),
            (1, self._pause_all_ranks),
            (3, self._pause_host),
            (3, self._kill_host),
            (3, self._cut_host_one_way),
            (2, self._cut_host_both_ways),
            (2, self._cut_hosts_apart),
            (2, self._node_down),
            (1, self._store_outage),
            (2, self._nodes_apart),
            (2, self._slow_link),
            (2, self._jump_clock),
            (2, self._operator),
            (1, self._leave),
            (1, self._unkillable),
            (1, self._crash_loop),
        ]
        if self._linked:
            faults.append((4, self._lie))
        weights, actions = zip(*faults, strict=True)
        self.random.choices(actions, weights)[0]()

    def _for_a_while(self, undo: Callable[[], None], longest: float = 12.0) -> None:
        self._undone.append(undo)
        self.world.at(self.random.uniform(0.1, longest), undo)

    def heal(self) -> None:
        self.world.loss = self.world.duplication = 0.0
        for undo in self._undone:
            undo()
        self.world.blocked.clear()
        self.world.nodes_down.clear()
        self.world.slow.clear()

    def _host(self) -> SimHost:
        return self.random.choice(list(self.world.hosts.values()))

    def _rank(self) -> tuple[SimHost, int]:
        host = self._host()
        return host, self.random.choice(list(host.state.ranks))

    def _crash_rank(self) -> None:
        host, rank = self._rank()
        host.crash(rank)

    def _pause_rank(self) -> None:
        self._pause(*self._rank())

    def _pause_all_ranks(self) -> None:
        """One call hangs them all: no rank waits for another, and none complains."""
        for host in self.world.hosts.values():
            for rank in host.state.ranks:
                self._pause(host, rank)

    def _pause(self, host: SimHost, rank: int) -> None:
        process = host.processes.get(rank)
        if process is not None and process.alive:
            process.pause()
            self._for_a_while(lambda: host.resume_rank(rank))

    def _pause_host(self) -> None:
        host = self._host()
        host.pause()
        self._for_a_while(host.resume)

    def _kill_host(self) -> None:
        host = self._host()
        ranks = tuple(host.state.ranks)
        host.kill()

        def restart() -> None:
            if self.world.hosts[host.name] is host:
                self.start_host(host.name, ranks)

        self._for_a_while(restart)

    def _block(self, *pairs: tuple[str, str]) -> None:
        self.world.blocked.update(pairs)
        self._for_a_while(lambda: self.world.blocked.difference_update(pairs))

    def _cut_host_one_way(self) -> None:
        name = self._host().name
        outward = self.random.random() < 0.5
        self._block(*[(name, node) if outward else (node, name) for node in NODES])

    def _cut_host_both_ways(self) -> None:
        name = self._host().name
        self._block(*[(name, node) for node in NODES], *[(node, name) for node in NODES])

    def _cut_hosts_apart(self) -> None:
        """A bridging partition: two hosts cannot reach each other, but both reach the store."""
        one, other = self._host().name, self._host().name
        if one != other:
            self._block((one, other), *([(other, one)] if self.random.random() < 0.5 else []))

    def _node_down(self) -> None:
        node = self.random.choice(NODES)
        self.world.nodes_down.add(node)
        self._for_a_while(lambda: self.world.nodes_down.discard(node))

    def _store_outage(self) -> None:
        self.world.nodes_down.update(NODES)
        self._for_a_while(self.world.nodes_down.clear)

    def _nodes_apart(self) -> None:
        one, other = self.random.sample(NODES, 2)
        self._block((one, other))

    def _slow_link(self) -> None:
        name = self.random.choice([*self.world.hosts, *NODES])
        self.world.slow.add(name)
        self._for_a_while(lambda: self.world.slow.discard(name))

    def _jump_clock(self) -> None:
        self._host().jump_clock(self.random.uniform(-8.0, 8.0))

    def _operator(self) -> None:
        host, rank = self._rank()
        action = self.random.choice(list(Action))
        if action is Action.REMOVE and rank in host.processes:
            host.processes[rank].leaving = True
        operation = f"op-{self.world.now}"
        host.do(lambda: host.feed(OperatorAsked(operation, action, rank)))

    def _leave(self) -> None:
        host, rank = self._rank()
        process = host.processes.get(rank)
        if process is not None and process.alive:
            process.leaving = True
            host.do(lambda: host.feed(Leave(rank, process.incarnation)))

    def _lie(self) -> None:
        """A host says that ranks of others are dead, and that an epoch is revoked."""
        host, instance = self._host(), self.instance
        if instance is None or host.links is None:
            return
        lies = {
            rank: instance.view.incarnations[rank]
            for rank in instance.view.active
            if rank not in host.state.ranks and self.random.random() < 0.5
        }
        revoked = instance.view.epoch + self.random.randrange(-2, 1000)
        host.links.say(News(host.state.ident, lies, revoked))

    def _unkillable(self) -> None:
        host, rank = self._rank()
        process = host.processes.get(rank)
        if process is not None and process.alive:
            process.unkillable = True
            self._for_a_while(lambda: host.crash(rank))

    def _crash_loop(self) -> None:
        host = self._host()
        host.crash_at_start = 0.7

        def stop() -> None:
            host.crash_at_start = 0.0

        self._for_a_while(stop)
