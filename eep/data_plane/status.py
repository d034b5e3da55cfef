"""Whether a step can be trusted, and if not, why.

Kernels never raise: they drop a peer, go on, and leave the reason in the rank's control page. This is what it says.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from eep.abi.peer_table import ControlPage, ranks_of
from eep.abi.structures import StatusBit
from eep.errors import EepError, EpochRevoked, StepFailed


@dataclass(frozen=True, slots=True)
class Status:
    """What went wrong since the last view was applied. All is well while :attr:`ok`."""

    epoch: int
    revoked: bool = False
    suspects: tuple[int, ...] = ()
    """Ranks that were dropped: their deadline passed, or a supervisor or peer said not to wait for them."""
    corrupt: tuple[int, ...] = ()
    """Ranks that were dropped because their message was malformed or did not fit the view."""
    misrouted: bool = False
    """A token was sent to an expert on a rank that is not in the view."""
    torn: bool = False
    """A peer that had dropped this rank overwrote what it was reading."""
    bad_table: bool = False
    """An entry of this rank's own peer table contradicted itself and was skipped."""
    mismatched: bool = False
    """A member of a process group called another collective than this rank, or met other ranks in it."""

    @property
    def ok(self) -> bool:
        return self == Status(self.epoch)

    def __str__(self) -> str:
        said = [
            (self.revoked, "the epoch was revoked"),
            (self.suspects, f"no answer from {_name(self.suspects)}"),
            (self.corrupt, f"{_name(self.corrupt)} sent a malformed message and was dropped"),
            (self.misrouted, "a token was routed to a rank outside the view"),
            (self.torn, "a peer overwrote results while they were read"),
            (self.bad_table, "an entry of this rank's peer table contradicts itself and was skipped"),
            (self.mismatched, "the members of a process group did not make the same call, or not with the same ranks"),
        ]
        return f"epoch {self.epoch}: " + ("; ".join(text for is_so, text in said if is_so) or "all well")

    def raise_if_bad(self) -> None:
        """Raises :class:`EpochRevoked` or :class:`StepFailed` unless the step can be trusted."""
        if not self.ok:
            raise (EpochRevoked if self.revoked else StepFailed)(f"{self}; this step must be run again")


class QuickLook:
    """Whether the status of several control pages is ok: the same as ``read_status(page, epoch).ok`` of each, but quick,
    because every step asks. What was good stays good while not a byte of it changes."""

    def __init__(self, *words: memoryview) -> None:
        """Of each page its :func:`words_of`."""
        self._words = words
        self._good: tuple[int, list[bytes]] | None = None

    def is_ok(self, epoch: int) -> bool:
        """EepError if the words of a page were released."""
        try:
            seen = (epoch, [words.tobytes() for words in self._words])
        except ValueError as error:
            raise EepError("an endpoint was closed while steps still use it; end the steps first") from error
        if seen == self._good:
            return True
        if is_ok := all(read_status(_page(words), epoch).ok for words in seen[1]):
            self._good = seen
        return is_ok


def words_of(page: ControlPage) -> memoryview:
    """What of a page says whether all is well. To be released before the page is unmapped."""
    return memoryview(page).cast("B")[: ControlPage.status.offset + ControlPage.status.size]


def _page(words: bytes) -> ControlPage:
    """A page that begins with ``words``."""
    return ControlPage.from_buffer_copy(words.ljust(ctypes.sizeof(ControlPage), b"\0"))


def _name(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def read_status(page: ControlPage, epoch: int) -> Status:
    """The status in a control page, for a rank that is at ``epoch``."""
    bits = page.status
    return Status(
        epoch=epoch,
        # Also when no kernel has noticed yet: a step that ended just before the revoke is not to be committed either.
        revoked=bool(bits & StatusBit.REVOKED) or page.revoked_epoch >= epoch > 0,
        suspects=ranks_of(page.suspects.mask | page.dropped.mask),
        corrupt=ranks_of(page.corrupt.mask),
        misrouted=bool(bits & StatusBit.MISROUTED),
        torn=bool(bits & StatusBit.TORN),
        bad_table=bool(bits & StatusBit.BAD_TABLE),
        mismatched=bool(bits & StatusBit.MISMATCH),
    )
