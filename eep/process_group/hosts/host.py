"""What a caller of ``init_process_group("eep")`` says of its host, where there are several."""

from __future__ import annotations

from dataclasses import dataclass, field

from eep.data_plane.transport.link_records import KEY_BYTES


@dataclass(frozen=True, slots=True)
class Host:
    """Checked when it is made: ``ValueError`` says what is wrong."""

    address: str
    """Of this host, at which the others reach it. It is bound to, and no other. Ranks that name the same are on one host."""
    key: bytes = field(repr=False)
    """Of the job: 32 random bytes, the same on every host and known to no other job."""
    provider: str = "tcp"
    """Of libfabric."""

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"the key of the job must have {KEY_BYTES} bytes, got {len(self.key)}")
        if self.address in ("", "0.0.0.0", "::"):
            raise ValueError(f"name the address of this host that the others reach it at, not {self.address!r}")
