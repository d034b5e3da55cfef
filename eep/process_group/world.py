"""The instance as one process sees it: one view, which all its process groups share, and an endpoint for each kind of device.

A process is in or out of all its groups at once, so membership belongs here and not to a group. Views come from a supervisor
or from :mod:`eep.process_group.agreement`; the endpoint in host memory is the one by which ranks find each other, watch
each other's processes and vote.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from eep.abi.peer_table import ALONE_EPOCH
from eep.data_plane.endpoint import Endpoint
from eep.data_plane.memory.exchange import Offer
from eep.data_plane.rendezvous import Rendezvous
from eep.data_plane.transport.remote_hosts import LinkedPeer, RemoteHosts
from eep.errors import EepError
from eep.process_group.gate import Gate
from eep.process_group.group_options import Options
from eep.process_group.lane import DeviceLane, Lane, group_id
from eep.process_group.peer_watch import Life, PeerWatch
from eep.view import View


class World:
    """Made with the default group, closed with it."""

    def __init__(
        self, rank: int, size: int, rendezvous: Rendezvous, options: Options, hosts: RemoteHosts | None = None
    ) -> None:
        """``hosts`` says which ranks are on other hosts, and how they are reached."""
        max_ranks = options.max_ranks or size
        if size > max_ranks:
            raise ValueError(f"{size} ranks are more than max_ranks={max_ranks}")
        self.size = size
        self.gate = Gate()
        self.changing = threading.RLock()
        """Held through a change of membership: one at a time."""
        self.endpoint = Endpoint(
            rank,
            options.shape(max_ranks, "cpu"),
            rendezvous=rendezvous,
            incarnation=options.incarnation,
            claims=options.claims,
            hosts=hosts,
        )
        self._endpoints = {"cpu": self.endpoint}
        try:
            for device in options.devices[1:]:
                self._endpoints[device] = Endpoint(
                    rank,
                    options.shape(max_ranks, device),
                    rendezvous=rendezvous.path / device,
                    device=device,
                    incarnation=self.endpoint.incarnation,
                    timeout_ms=options.device_timeout_ms,
                    claims=options.claims,
                    hosts=hosts,
                )
        except BaseException:
            self.endpoint.close()
            raise
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._uses: dict[tuple[str, str], int] = {}
        """How many lanes of a name have been closed in this view, where any has: see :meth:`open_lane`."""
        self._on_growth: list[Callable[[int], None]] = []
        self._watch = PeerWatch(self._ended)

    @property
    def rank(self) -> int:
        return self.endpoint.rank

    @property
    def view(self) -> View:
        return self.endpoint.view

    @property
    def devices(self) -> tuple[str, ...]:
        """The kinds of device whose tensors the groups take."""
        return tuple(self._endpoints)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(self._endpoints.values())

    # ---- lanes ----

    def open_lane(self, name: str, ranks: Iterable[int], device: str = "cpu") -> Lane:
        """A lane for the group of that name. Groups that hold every rank grow with the world.

        A name may be used again within a view: torch does so where groups are named by their ranks. Rounds count from 1
        again, so a rank that is still in the last group of the name would take those of the new one for its own. So the
        members look for the new group by another number: all have ended as many of that name in this view. On a GPU a
        name may not be used again: a lane changes its place with its number, and a captured graph knows the old one.
        """
        if (device, name) in self._lanes:
            raise EepError(f"there is a process group {name!r} already; destroy it first")
        if any(used == name and on != "cpu" for on, used in self._uses):
            raise EepError(
                f"the process group {name!r} was destroyed in this view (epoch {self.view.epoch}), and other ranks may still "
                "be in it; give the new one another name (group_name=...), or make it again after the next view"
            )
        room = self._endpoints[device].shape.lanes
        if sum(on == device for on, _ in self._lanes) == room:
            raise EepError(
                f"process group {name!r}: all {room} places for groups on the {device} are taken, of which EEP "
                "itself has one; destroy a group that is not needed any more. eep.pg.Options(lanes=...) says how many places "
                "there are, 64 at most"
            )
        kind = Lane if device == "cpu" else DeviceLane
        lane = kind(self._endpoints[device], self.gate, group_id(name, self._uses.get((device, name), 0)), list(ranks))
        self._lanes[device, name] = lane
        return lane

    def close_lanes(self, name: str) -> None:
        for device in self._endpoints:
            if (lane := self._lanes.pop((device, name), None)) is not None:
                lane.close()
                if len(self.view.active) > 1:  # alone, no other rank can still be in it
                    self._uses[device, name] = self._uses.get((device, name), 0) + 1

    def on_growth(self, grown: Callable[[int], None]) -> None:
        """``grown(size)`` is called when ranks were added beyond those there were at launch."""
        self._on_growth.append(grown)

    # ---- views ----

    def claim(self, incarnation: int) -> None:
        """Becomes that life of the rank, in a world that claims nothing yet."""
        with self.changing:
            for endpoint in self.endpoints:
                endpoint.claim(incarnation)

    def start_alone(self) -> View:
        """Only this rank, in every group."""
        for endpoint in self.endpoints:
            endpoint.start_alone()
        return self.view

    def prepare(
        self, ranks: Iterable[int], timeout: float, remote_lives: Mapping[int, int]
    ) -> Mapping[int, Offer | LinkedPeer]:
        """Maps the newest incarnations of ``ranks`` on every device, ahead of a view with them, or has links with those
        lives of ranks on other hosts. Returns what is in host memory."""
        deadline = time.monotonic() + timeout
        offers = {
            device: endpoint.prepare_ranks(
                ranks, timeout=max(0.0, deadline - time.monotonic()), remote_lives=remote_lives
            )
            for device, endpoint in self._endpoints.items()
        }
        return offers["cpu"]

    def forget_prepared(self) -> None:
        for endpoint in self.endpoints:
            endpoint.forget_prepared()

    def apply(self, view: View, timeout: float) -> View:
        """Enters a view that was committed. What is under way in the last one ends first.

        May fail half-way, when a peer cannot be reached on one of its devices: then it is to be tried again, or overtaken by
        a newer view.
        """
        with self.changing, self.gate.alone(self._end_waits):
            for device, endpoint in self._endpoints.items():
                if endpoint.view != view:
                    endpoint.apply_view(view, timeout=timeout)
                    self._forget_uses(device)
            self._grow(max(self.size, 1 + max(view.active)))
        self._watch.follow(self.endpoint.peer_processes)
        return view

    def revoke(self, epoch: int) -> None:
        """Ends ``epoch`` for every rank, on every device."""
        for endpoint in self.endpoints:
            endpoint.revoke(epoch)

    def close(self) -> None:
        """Leaves. Calls that still wait end first."""
        self._watch.close()
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
        with self.gate.alone(self._end_waits):
            for endpoint in reversed(self.endpoints):
                endpoint.close()

    # ---- within ----

    def _forget_uses(self, device: str) -> None:
        """A view begins. Its rounds are told from earlier ones by the epoch, and a rank that joins knows nothing of what
        names were used for before: each means the same to all again."""
        for kind, name in [each for each in self._uses if each[0] == device]:
            del self._uses[kind, name]
            if (lane := self._lanes.get((kind, name))) is not None:
                lane.rename(group_id(name))

    def _grow(self, size: int) -> None:
        if size == self.size:
            return
        for lane in self._lanes.values():
            if lane.ranks == list(range(self.size)):
                lane.grow(size)
        self.size = size
        for grown in self._on_growth:
            grown(size)

    def _end_waits(self) -> None:
        """Ends all waits of this process for what belongs to the present view."""
        for endpoint in self.endpoints:
            if endpoint.view.epoch != ALONE_EPOCH:
                endpoint.end_waits()
        # A rank that is alone waits only for messages of its own.
        for lane in self._lanes.values():
            lane.poke()

    def _ended(self, life: Life) -> None:
        """The process of a peer is gone. If it did not say that it leaves, the epoch is over for every rank."""
        view = self.view  # read once: a newer one, without that process, must not suffer for it
        if not _is_in(view, life):
            return
        if not self.endpoint.has_left(life[0]):
            self.revoke(view.epoch)
            return
        # What it had finished stays where it is, and calls on the host see by themselves that no more will come. Kernels
        # on a device do not. A suspicion names no epoch, so it is told where no view can be entered meanwhile.
        self.gate.enter()
        try:
            for endpoint in self.endpoints[1:]:
                if _is_in(endpoint.view, life):
                    endpoint.suspect(life[0])
        finally:
            self.gate.leave()


def _is_in(view: View, life: Life) -> bool:
    rank, incarnation = life
    return rank in view.active and view.incarnations[rank] == incarnation
