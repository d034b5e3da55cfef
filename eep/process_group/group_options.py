"""What a caller of ``init_process_group("eep", pg_options=...)`` may choose."""

from __future__ import annotations

import os
from dataclasses import dataclass

from eep.abi import native
from eep.data_plane.transport.remote_hosts import RemoteHosts
from eep.process_group.hosts.host import Host

# A GPU's memory is not given lazily: groups x blocks x two halves x bytes, 64 MiB in all.
_GPU_LANES = 32
_GPU_BLOCKS = 8
_GPU_BYTES = 1 << 17
# One for all members, one for those of a host, one for the first of each host.
_HOST_PARTS = 3


@dataclass(frozen=True, slots=True)
class Options:
    """``torch.distributed.init_process_group("eep", ..., pg_options=eep.pg.Options(...))``."""

    defer_join: bool = False
    """Start alone: every group contains only this rank, and no rank waits for it, until :func:`eep.pg.join`."""
    max_ranks: int | None = None
    """How many ranks there may ever be; by default as many as at launch."""
    rendezvous: str | os.PathLike[str] | None = None
    """A private directory in which the ranks of this host meet. By default that of ``EEP_RENDEZVOUS``, else a temporary
    one, agreed on through the store. A rank that joins later finds that one while the store lives; where the store may be
    gone by then, give all ranks a directory."""
    incarnation: int | None = None
    """Which life of this rank this is, where a supervisor counts them (``EEP_INCARNATION``); else the next unused."""
    claims: bool = True
    """Whether this process is the rank from the beginning. If not, it is alone until it is told which life of the rank it is
    (``World.claim``), and another process may be the rank meanwhile."""
    lanes: int = 64
    """How many groups there may be at once."""
    chunk_bytes: int = 1 << 20
    """How much of a tensor is moved at a time."""
    message_bytes: int = 1 << 15
    """How much of a message is moved at a time."""
    devices: tuple[str, ...] = ("cpu",)
    """Whose tensors the groups take: ``("cpu", "cuda")`` where there is a GPU. Messages are for the CPU only."""
    remote: RemoteHosts | None = None
    """Which ranks are on other hosts, and how they are reached, where a supervisor says who is in (``eep.pg.apply_view``)."""
    host: Host | None = None
    """Which host this is, where the ranks are on several and there is no supervisor: they find each other through the store
    that torch was given."""
    device_timeout_ms: float = 10_000
    """How long a kernel on a GPU waits for a rank before it gives it up."""

    def shape(self, max_ranks: int, device: str) -> native.Shape:
        """What an endpoint on such a device is made for."""
        on_cpu = device == "cpu"
        return native.Shape(
            max_ranks=max_ranks,
            lanes=self.lanes if on_cpu else min(self.lanes, _GPU_LANES),
            lane_parts=_GPU_BLOCKS if not on_cpu else 1 if self.remote is None and self.host is None else _HOST_PARTS,
            lane_bytes=self.chunk_bytes if on_cpu else _GPU_BYTES,
            pipe_bytes=self.message_bytes if on_cpu else 0,
        )

    def __post_init__(self) -> None:
        if self.devices[:1] != ("cpu",) or not set(self.devices) <= {"cpu", "cuda"}:
            raise ValueError(f"devices are ('cpu',) or ('cpu', 'cuda'), got {self.devices}")
        if self.max_ranks is not None and self.max_ranks < 1:
            raise ValueError(f"max_ranks must be positive, got {self.max_ranks}")
        if self.remote is not None and self.host is not None:
            raise ValueError(
                "give either host=..., for ranks that agree among themselves, or remote=..., with a supervisor"
            )
        if self.remote is not None and not self.defer_join:
            raise ValueError(
                "a supervisor lets in the ranks of other hosts (eep.pg.apply_view): start with Options(defer_join=True)"
            )
        if self.lanes < 2:
            raise ValueError(f"lanes must be at least 2, one is for EEP itself, got {self.lanes}")
