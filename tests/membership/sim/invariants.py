"""What must hold after every event, whatever fails. A violation carries the seed that shows it."""

from __future__ import annotations

from typing import Any

from eep.control.store.key_value import Change
from eep.control.store.record_codec import INSTANCE_KEY, host_in
from eep.membership import InstanceRecord, Phase, Policy, phase_name
from eep.view import View
from tests.membership.sim.rank import SimRank
from tests.membership.sim.world import World


class Watchdog:
    """Looks over every commit, every launch and every running rank."""

    def __init__(self, world: World, policy: Policy) -> None:
        self.world, self.policy = world, policy
        self.views: dict[int, View] = {}
        self.runs: set[int] = set()
        """Epochs that were allowed to run."""
        self.last: InstanceRecord | None = None
        self.removed: set[tuple[int, int]] = set()
        self.launched: dict[tuple[int, int], SimRank] = {}
        self.lease_ended: set[str] = set()
        """Hosts whose lease ended; what they had in the view then may be removed unseen."""
        self._checked: dict[int, View] = {}
        """Views already found good under the rank that runs them; both promises, once true, stay true."""
        self._hangs: dict[int, tuple[SimRank, float]] = {}
        """Ranks that hang while their host believes that they run, and since when."""
        self.hosts_lost: list[str] = []
        """Hosts whose reports others have removed."""
        world.on_change, world.on_host_lost = self.changed, self.host_lost

    def changed(self, change: Change[Any]) -> None:
        if change.key == INSTANCE_KEY:
            assert change.value is not None, "the record was deleted"
            self.committed(change.value)
        elif change.value is None:
            self.lease_ended.add(host_in(change.key))

    def host_lost(self, name: str) -> None:
        """A host is taken for lost: its ranks have stopped before that."""
        self.hosts_lost.append(name)
        host = self.world.hosts[name]
        runs = [rank for rank, process in host.processes.items() if process.running]
        assert not runs or host.was_irregular, f"{name} was taken for lost while ranks {runs} ran"

    def committed(self, instance: InstanceRecord) -> None:
        view, last = instance.view, self.last
        assert self.views.setdefault(view.epoch, view) == view, f"two views of epoch {view.epoch}"
        if last is not None:
            assert instance.serial == last.serial + 1, "serials must not skip or repeat"
            assert 0 <= view.epoch - last.view.epoch <= 1, "epochs must grow one by one"
            for rank in range(view.max_ranks):
                assert view.incarnations[rank] >= last.view.incarnations[rank], "incarnations must grow"
                assert instance.granted[rank] >= last.granted[rank], "grants must grow"
            self._removals(last, instance)
        members = {(rank, view.incarnations[rank]) for rank in view.active}
        assert not members & self.removed, f"removed incarnations are back: {members & self.removed}"
        assert members <= set(self.launched), "a member was never launched"
        if instance.phase is Phase.RUN:
            self.runs.add(view.epoch)
        self.last = instance

    def _removals(self, last: InstanceRecord, instance: InstanceRecord) -> None:
        members = {(rank, instance.view.incarnations[rank]) for rank in instance.view.active}
        for rank in last.view.active:
            gone = (rank, last.view.incarnations[rank])
            if gone in members:
                continue
            self.removed.add(gone)
            process = self.launched[gone]
            excused = process.leaving or process.unkillable or process.host in self.lease_ended
            assert not process.alive or excused, f"rank {gone} was removed alive, its lease standing: {instance.reason}"

    def launch(self, process: SimRank) -> None:
        key = (process.rank, process.incarnation)
        assert key not in self.launched, f"{key} was launched twice"
        self.launched[key] = process

    def stalled(self, process: SimRank) -> None:
        """A rank is taken for stalled. Half of the deadline: a clock that jumps may have a look count twice."""
        still = self.world.now - process.progressed_at
        who = f"rank {process.rank} (incarnation {process.incarnation})"
        assert process.hung, f"{who} was taken for stalled, but never hung"
        assert still > 0.45 * self.policy.stall_deadline, f"{who} was taken for stalled after {still:.2f} s"

    def check_standing(self) -> None:
        """No rank hangs for long while its host watches and believes that it runs."""
        before, self._hangs = self._hangs, {}
        if self.policy.stall_deadline <= 0:
            return
        for host in self.world.hosts.values():
            if not host.alive or host.paused:
                continue
            runs = phase_name(host.state) == "RUN"
            for rank, process in host.processes.items():
                hangs = process.alive and process.paused and not process.unkillable
                if hangs and runs and host.state.is_in(rank):
                    _, since = self._hangs[id(process)] = before.get(id(process), (process, self.world.now))
                    still = self.world.now - since
                    limit = 1.5 * self.policy.stall_deadline
                    assert still < limit, f"rank {rank} hangs for {still:.1f} s, and no host has noticed"

    def check_running(self) -> None:
        """A rank that runs does so under a committed view that was allowed to run."""
        for host in self.world.hosts.values():
            for process in host.processes.values():
                view = process.view
                if view is not None and view is not self._checked.get(id(process)) and process.running:
                    assert self.views[view.epoch] == view, "a rank runs a view that was never committed"
                    assert view.epoch in self.runs, "a rank runs before every rank has settled"
                    self._checked[id(process)] = view
