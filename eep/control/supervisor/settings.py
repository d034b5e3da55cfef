"""What a supervisor is told beside its ranks and its policy, grouped by what it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from eep.control.store.embedded_store import RecordStore

LEASE_TTL = 10.0


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """What every process of a rank gets."""

    environment: Mapping[str, str] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    """Variables (``NAME=VALUE``) that identify ranks to the keeper. Ranks need them if they are forked from a
    process that was started before the supervisor's directory had a name."""


@dataclass(frozen=True, slots=True)
class DirectorySettings:
    """The private directory. Without a path the supervisor makes one, and removes it in the end."""

    path: Path | None = None
    remove: bool | None = None
    """Whether the supervisor removes the directory in the end; None: only if it made it."""
    key: bytes | None = None
    """The key of the job, which its hosts share; None: the one that is there, or a new one."""

    @property
    def is_removed(self) -> bool:
        return self.path is None if self.remove is None else self.remove


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where the record and the reports live, and for how long a host may be silent there."""

    store: RecordStore | None = None
    """None: in this process, for one host."""
    lease_ttl: float = LEASE_TTL
    """Seconds after which the store takes a silent host for dead."""
