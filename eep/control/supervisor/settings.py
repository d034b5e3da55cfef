"""What a supervisor is told beside its ranks and its policy, grouped by what it is about."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from eep.control.store.embedded_store import RecordStore
from eep.control.wire.sealed_frames import KEY_BYTES

LEASE_TTL = 10.0
HOST_TIMEOUT = 1.5
HEARTBEAT = 0.1
LEAST_BEATS = 5
"""Heartbeats in the host timeout: so many must be lost before a host is taken for silent."""


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


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Direct links to the supervisors of the other hosts. Checked when it is made: ``ValueError`` says what is wrong.

    With links, the death of a rank is known on all hosts within milliseconds, and the loss of a host after
    ``host_timeout_s``. Without them (``Supervisor(links=None)``), a death takes as long as the store needs to pass a report
    on and a record back, and the loss of a host as long as its lease. Give every host of a job links, or none::

        store = EtcdStore(endpoints, job, seal=RecordSeal(key))
        Supervisor(
            ...,
            host="host-a",
            directory=DirectorySettings(path, key=key),
            store=StoreSettings(store, lease_ttl=10.0),
            links=LinkSettings("10.0.0.1", key),
        )

    The supervisor listens at ``address`` and nowhere else, and tells the others where in a record of the store. So the
    store must be one that all hosts share, and seal its records with the job's key.
    """

    address: str
    """That of this host, in numbers, at which the others reach it."""
    key: bytes
    """Of the job, the same on every host: it seals what passes over the links."""
    port: int = 0
    """Where to listen; 0: where there is a free port. Name one if there is a firewall between the hosts."""
    host_timeout_s: float = HOST_TIMEOUT
    """After how long a silence a host is taken for lost: nothing comes over its link, and its report in the store does not
    move. A host that is heard by neither way stops its ranks after 0.7 of this time, so all hosts need the same."""
    heartbeat_s: float = HEARTBEAT
    """How often a link says that its host is there."""

    def __post_init__(self) -> None:
        try:
            bad = ipaddress.ip_address(self.address).is_unspecified
        except ValueError:
            bad = True
        if bad:
            raise ValueError(
                f"name the address of this host that the others reach it at, in numbers, not {self.address!r}"
            )
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"the key of the job must have {KEY_BYTES} bytes, got {len(self.key)}")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"a port is a number from 0 to 65535, got {self.port}")
        if self.heartbeat_s <= 0 or self.host_timeout_s < LEAST_BEATS * self.heartbeat_s:
            raise ValueError(
                f"the host timeout must be at least {LEAST_BEATS} heartbeats, got {self.host_timeout_s} s and a heartbeat "
                f"every {self.heartbeat_s} s"
            )
