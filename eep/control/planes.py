"""Everything of a rank that a view changes, under one member: its buffers and its process groups.

::

    with eep.Buffer(rank, rendezvous=member_rendezvous(), incarnation=..., ...) as buffer:
        member = Member.connect(Planes(Plane.of(buffer)))
        member.ready()
        while (view := member.boundary(repair)) is not None:
            result = step(buffer, view)
            if may_commit(member, buffer.status()):
                commit(result)

Planes enter a view in order, and the view counts as applied when all have it. If one fails, the member tries again, unless
a newer view has come.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from eep.control.member import Member
from eep.data_plane.buffer import Buffer
from eep.data_plane.control_page import SharedControlPage
from eep.data_plane.device_files import open_device_files
from eep.data_plane.endpoint import Endpoint
from eep.data_plane.status import Status
from eep.errors import PeerUnreachable
from eep.view import View

APPLY_WITHIN = 0.2
"""How long one try waits for a peer that is not there yet; between tries the member looks for newer views."""


@dataclass(frozen=True, slots=True)
class Plane:
    """An endpoint and how it enters a view, within some seconds."""

    endpoint: Endpoint
    apply: Callable[[View, float], object]

    @classmethod
    def of(cls, buffer: Buffer) -> Plane:
        return cls(buffer, lambda view, seconds: buffer.apply_view(view, timeout=seconds))


class Planes:
    """The supervisor writes the control page of every plane itself. The member revokes them too, by word."""

    def __init__(self, *planes: Plane) -> None:
        if not planes:
            raise ValueError("Planes needs at least one plane; use NoDataPlane for a rank that shares no memory")
        self._planes = planes
        # Own mappings: the thread that hears of a revoke must not depend on what the main thread does.
        self._pages = [SharedControlPage(os.dup(plane.endpoint.control_fd)) for plane in planes]

    @property
    def control_fds(self) -> tuple[int, ...]:
        return tuple(plane.endpoint.control_fd for plane in self._planes)

    @property
    def device_files(self) -> tuple[int, ...]:
        return open_device_files() if any(plane.endpoint.shares_gpu for plane in self._planes) else ()

    def revoke(self, epoch: int) -> None:
        for page in self._pages:
            page.revoke(epoch)

    def apply(self, view: View) -> bool:
        try:
            for plane in self._planes:
                if plane.endpoint.view != view:
                    plane.apply(view, APPLY_WITHIN)
        except PeerUnreachable:
            return False  # it may be slow, or it may have died while it joined: then another view is on its way
        return True


def may_commit(member: Member, status: Status) -> bool:
    """Whether the step that just ended can be trusted. If not, the supervisor is told why; run it again.

    After False the next boundary waits for a new epoch.
    """
    if status.ok:
        return True
    blamed = sorted({*status.suspects, *status.corrupt})
    if blamed and not status.revoked:
        member.suspect(blamed, str(status))
    else:
        member.revoked()
    return False
