"""What must hold after every event, whatever fails. A violation carries the seed that shows it."""

from __future__ import annotations

from typing import Any

from eep.control.store.key_value import Change
from eep.control.store.record_codec import INSTANCE_KEY, host_in
from eep.membership import InstanceRecord, Phase
from eep.view import View
from tests.membership.sim.rank import SimRank
from tests.membership.sim.world import World


class Watchdog:
    """Looks over every commit, every launch and every running rank."""

    def __init__(self, world: World) -> None:
        self.world = world
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
        world.on_change = self.changed

    def changed(self, change: Change[Any]) -> None:
        if change.key == INSTANCE_KEY:
            assert change.value is not None, "the record was deleted"
            self.committed(change.value)
        elif change.value is None:
            self.lease_ended.add(host_in(change.key))

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

    def check_running(self) -> None:
        """A rank that runs does so under a committed view that was allowed to run."""
        for host in self.world.hosts.values():
            for process in host.processes.values():
                view = process.view
                if view is not None and view is not self._checked.get(id(process)) and process.running:
                    assert self.views[view.epoch] == view, "a rank runs a view that was never committed"
                    assert view.epoch in self.runs, "a rank runs before every rank has settled"
                    self._checked[id(process)] = view
