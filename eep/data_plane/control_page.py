"""A rank's control page as its supervisor sees it: one store here ends a wait in that rank's kernels.

Needs the page's descriptor (``Buffer.control_fd``, passed over a Unix socket) and nothing else: no torch, no CUDA.
"""

from __future__ import annotations

from eep.abi import native
from eep.abi.peer_table import ControlPage, RankSet
from eep.data_plane.memory.exchange import CONTROL_BYTES
from eep.data_plane.memory.shm import SharedMemory
from eep.data_plane.status import Status, read_status


class SharedControlPage:
    """The control page of one rank, in whichever process holds its descriptor."""

    def __init__(self, fd: int) -> None:
        """Takes over ``fd`` and maps the page, if that is what it is."""
        self._memory = SharedMemory.adopt(fd, CONTROL_BYTES)
        self._page = ControlPage.from_address(self._memory.address)
        self._library = native.load()

    def revoke(self, epoch: int) -> None:
        """Ends ``epoch`` and all before it for that rank. Revoking an older epoch again does nothing."""
        self._library.eep_control_revoke(self._page, epoch)

    def suspect(self, ranks: int) -> None:
        """Tells that rank not to wait for the ranks of this bit mask in its current epoch."""
        self._library.eep_control_suspect(self._page, RankSet.of(ranks))

    def status(self, epoch: int) -> Status:
        """What that rank's kernels have found wrong in ``epoch``."""
        return read_status(self._page, epoch)

    def close(self) -> None:
        self._memory.close()
