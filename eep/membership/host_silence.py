"""When a host is taken for lost because it is silent, and until when a host may rely on not being taken for lost.

Two rules, for the two sides, and the second ends earlier:

* A host is lost to another when nothing has come over their link for the host timeout, and its report in the store has not
  moved for ``UNMOVED`` of it. Its report is then removed if it has *still* not moved, by a compare-and-swap: the store
  decides. From there on it is as if its lease had ended.
* A host relies on being heard for ``RELIED_ON`` of the host timeout after all linked hosts, or the store, heard it last. Then
  it holds its ranks. It writes its report again as soon as a linked host has not answered for ``QUIET`` of the timeout. So
  one that has lost a link, and reaches the store, goes on.

A silence counts only while it is looked at: a supervisor that was stopped finds all others silent when it wakes up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

QUIET = 0.2
RELIED_ON = 0.6
UNMOVED = 0.8
LOOKS = 10
"""In the host timeout."""


@dataclass(frozen=True, slots=True)
class HostSilence:
    """What the looks at one host have shown, in seconds."""

    heard: int
    """How many messages had come over the link."""
    looked_at: float
    link_s: float = 0.0
    version: int = 0
    """That of its report; 0: it has none, or was not asked for."""
    report_s: float = 0.0

    def is_quiet(self, timeout: float) -> bool:
        """Whether its report is worth a look."""
        return self.link_s >= QUIET * timeout

    def is_lost(self, timeout: float) -> bool:
        return self.version > 0 and self.link_s >= timeout and self.report_s >= UNMOVED * timeout


@dataclass(frozen=True, slots=True)
class ReadReport:
    """The version of a report, 0 if there is none, and when the store had said so."""

    version: int
    at: float


def after_silence(
    before: HostSilence | None, heard: int, read: ReadReport | None, now: float, timeout: float
) -> HostSilence:
    """What is known after a look at ``now``. It counts for twice the time after which it was due, and no more. A report
    that was read since the look before counts from then on."""
    if before is None or before.heard != heard:
        return HostSilence(heard, now)
    passed = max(0.0, min(now - before.looked_at, 2 * timeout / LOOKS))
    if read is None or read.version == 0:
        return HostSilence(heard, now, before.link_s + passed)
    same = read.version == before.version
    report_s = before.report_s + passed if same else max(0.0, min(passed, now - read.at))
    return HostSilence(heard, now, before.link_s + passed, read.version, report_s)


def relied_on_until(written_at: float, heard_at: Iterable[float], timeout: float) -> float:
    """Until when a host may rely on being heard. ``written_at`` is when it asked for the last write of its report that was
    done, ``heard_at`` when it sent what each linked host has last confirmed."""
    last = min(heard_at, default=None)
    return float("inf") if last is None else max(written_at, last) + RELIED_ON * timeout


def must_write(now: float, heard_at: Iterable[float], timeout: float) -> bool:
    """Whether some linked host has not confirmed for so long that the store must know that this one is there."""
    return min(heard_at, default=now) < now - QUIET * timeout
