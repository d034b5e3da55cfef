"""The hosts of an instance, as its experts see them: which rank is on which, and how ranks reach those of other hosts.

None of this is needed where all ranks are on one host. On several, the maker of a rank's
:class:`~eep.experts.coverage.Coverage` gives it::

    InstanceHosts(
        host_of=("a", "a", "b", "b"),       # for every rank that there may be, the same on every rank
        own="a",
        registry=StoreRegistry(lambda: EtcdStore(endpoints, job, seal=RecordSeal(key))),
        transport=StartingEngine("10.0.0.1"),  # the address of this host; the backup client may use the same
    )

The first placement is planned with ``hosts.topology`` too, and ``least_copies=LEAST_COPIES``, before any rank loads. A backup
service is told the number of its host: ``eep backup serve --host N``, where ``N`` is ``hosts.number``.
"""

from __future__ import annotations

from dataclasses import dataclass

from eep.experts.backup.transport import Transport
from eep.experts.registry.directory_registry import Registry

LEAST_COPIES = 2
"""Of each expert, where slots allow, before any has more. They are on different hosts, so any one host may go."""


@dataclass(frozen=True, slots=True)
class InstanceHosts:
    """Checked when it is made: ``ValueError`` says what is wrong."""

    host_of: tuple[str, ...]
    """The name of the host of each rank that there may be. It must not change while the instance lives: ranks plan with it,
    and all must plan the same."""
    own: str
    """The host of this rank."""
    registry: Registry
    """In which ranks and backups of all hosts say what they hold. What is read from it must be sealed with the key of the
    job, as a store does that was given one: a reader asks the engines that records name, and no others."""
    transport: Transport
    """By which this rank reads from other hosts, and they from it."""

    def __post_init__(self) -> None:
        if self.own not in self.host_of:
            raise ValueError(f"this host is {self.own!r}, and no rank is on it: {', '.join(sorted(set(self.host_of)))}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.host_of)))

    @property
    def topology(self) -> tuple[int, ...]:
        """The number of each rank's host, as placements and backups know it."""
        return tuple(self.names.index(name) for name in self.host_of)

    @property
    def number(self) -> int:
        """That of this host."""
        return self.names.index(self.own)

    def is_near(self, rank: int) -> bool:
        return self.host_of[rank] == self.own
