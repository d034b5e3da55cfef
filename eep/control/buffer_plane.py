"""A :class:`eep.Buffer` under a member: views that were committed are applied to it, and revokes end its waits.

::

    with eep.Buffer(rank, rendezvous=member_rendezvous(), incarnation=..., ...) as buffer:
        member = Member.connect(BufferPlane(buffer))
        member.ready()
        while (view := member.boundary(repair)) is not None:
            result = step(buffer, view)
            if may_commit(member, buffer.status()):
                commit(result)
"""

from __future__ import annotations

import os
from pathlib import Path

from eep.control.member import Member
from eep.control.private_directory import CONTROL_DIRECTORY, PrivateDirectory
from eep.data_plane.buffer import Buffer
from eep.data_plane.control_page import SharedControlPage
from eep.data_plane.status import Status
from eep.errors import PeerUnreachable
from eep.view import View

APPLY_WITHIN = 0.2
"""How long one try waits for a peer that is not there yet; between tries the member looks for newer views."""


def member_rendezvous() -> Path:
    """Where the ranks of this host's supervisor meet."""
    return PrivateDirectory(Path(os.environ[CONTROL_DIRECTORY])).ranks


class BufferPlane:
    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        # A mapping of our own: the thread that hears of a revoke must not depend on what the main thread is doing.
        self._page = SharedControlPage(os.dup(buffer.control_fd))

    @property
    def control_fd(self) -> int:
        return self._buffer.control_fd

    def revoke(self, epoch: int) -> None:
        self._page.revoke(epoch)

    def apply(self, view: View) -> bool:
        try:
            self._buffer.apply_view(view, timeout=APPLY_WITHIN)
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
