"""Which placement counts in which epoch: a log in a directory that the ranks of a host share.

A record has a name, ``epoch.number``, and the newest name counts. A rank that enters an epoch gives the newest record the
first name of that epoch; when ranks switch to another placement, that gets the next name. A name is given once, by a hard
link: whoever comes first decides, and all find the same. So ranks agree on the placement of an epoch though some had switched
when a peer was lost and others had not, and a rank that has just started finds it too. A link takes no room on a full disk.

A proposal is a record that does not count yet. Ranks stage what it moves and, once all have, give it a name.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from eep.access import make_private
from eep.errors import EepError
from eep.experts.placement.packing import FloatArray
from eep.experts.placement.slot_plan import Placement

_PROPOSED = ".proposed"
_LOOKS = 100


class BaseRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A placement over every rank that there may be, and the load for which it was made."""

    doses: int
    """How many switches led to it."""
    experts: int
    slots_per_rank: int
    layers: int
    table: bytes
    load: bytes
    least_copies: int = 1
    """How many copies each expert has, where slots allow, before any has more."""
    open_slots: int = 0
    """How many slots of each rank are open where these do; 0: all are, always."""
    hosts: tuple[int, ...] = ()
    """The host of each rank that there may be; none: all are on one."""

    @classmethod
    def of(
        cls,
        placement: Placement,
        load: FloatArray,
        doses: int,
        least_copies: int = 1,
        open_slots: int = 0,
        hosts: tuple[int, ...] = (),
    ) -> BaseRecord:
        table = np.ascontiguousarray(placement.physical_to_logical, dtype="<i4").tobytes()
        numbers = np.ascontiguousarray(load, dtype="<f4").tobytes()
        shape = (placement.experts, placement.slots_per_rank, placement.layers)
        return cls(doses, *shape, table, numbers, least_copies, open_slots, hosts)

    def renewed(self, placement: Placement, load: FloatArray, doses: int) -> BaseRecord:
        """The same with another placement and another load."""
        return BaseRecord.of(placement, load, doses, self.least_copies, self.open_slots, self.hosts)

    @property
    def placement(self) -> Placement:
        table = np.frombuffer(self.table, dtype="<i4").reshape(self.layers, -1).astype(np.int64)
        return Placement(table, self.experts, self.slots_per_rank)

    @property
    def topology(self) -> tuple[int, ...]:
        """The host of each rank, by number."""
        return self.hosts or (0,) * (len(self.table) // (4 * self.layers * self.slots_per_rank))

    @property
    def demand(self) -> FloatArray:
        return np.frombuffer(self.load, dtype="<f4").reshape(self.layers, self.experts).astype(np.float64)


@dataclass(frozen=True, slots=True)
class LogName:
    """``number`` 0 is what an epoch begins with."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch:020d}.{self.number:09d}"


class PlacementLog:
    def __init__(self, directory: Path) -> None:
        self._directory = make_private(directory)

    def enter(self, epoch: int, first: BaseRecord) -> BaseRecord:
        """What counts at the beginning of ``epoch``. ``first``: what counts if no epoch has begun yet."""
        name = str(LogName(epoch, 0))
        for _ in range(_LOOKS):
            newest = max(self._names(), default=None)
            try:
                if newest is None:
                    self._write(name, first)
                else:
                    os.link(self._directory / newest, self._directory / name)
            except FileExistsError:
                break
            except FileNotFoundError:  # a rank in a later epoch has removed it, for there is a newer one
                continue
            except OSError as error:
                raise EepError(
                    f"the placement of epoch {epoch} cannot be noted in {self._directory}: {error}; moving experts needs a "
                    "file system with hard links"
                ) from error
            else:
                break
        found = self._read(name)
        self._forget_before(epoch - 1)
        return found

    def propose(self, name: LogName, attempt: int, record: BaseRecord) -> None:
        with contextlib.suppress(FileExistsError):
            self._write(f"{name}.{attempt:06d}{_PROPOSED}", record)

    def newest_proposal(self, name: LogName) -> tuple[int, BaseRecord] | None:
        """The last proposal for that name, and the number of its attempt."""
        found = [
            each for each in os.listdir(self._directory) if each.startswith(f"{name}.") and each.endswith(_PROPOSED)
        ]
        if not found:
            return None
        newest = max(found)
        return int(newest.removeprefix(f"{name}.").removesuffix(_PROPOSED)), self._read(newest)

    def commit(self, name: LogName, attempt: int) -> None:
        """Give the proposal its name. Another rank may have done so. OSError if the disk does not let it."""
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # not found: others are two epochs on
            os.link(self._directory / f"{name}.{attempt:06d}{_PROPOSED}", self._directory / str(name))

    def _names(self) -> Iterator[str]:
        return (
            each for each in os.listdir(self._directory) if not each.startswith(".") and not each.endswith(_PROPOSED)
        )

    def _read(self, name: str) -> BaseRecord:
        try:
            return msgspec.msgpack.decode((self._directory / name).read_bytes(), type=BaseRecord)
        except (OSError, msgspec.MsgspecError) as error:
            raise EepError(f"the placement {name} cannot be read: {error}") from error

    def _write(self, name: str, record: BaseRecord) -> None:
        """FileExistsError if the name is given already."""
        descriptor, unnamed = tempfile.mkstemp(dir=self._directory, prefix=".")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(msgspec.msgpack.encode(record))
            os.link(unnamed, self._directory / name)
        finally:
            os.unlink(unnamed)

    def _forget_before(self, epoch: int) -> None:
        for name in os.listdir(self._directory):
            if not name.startswith(".") and name < str(LogName(max(0, epoch), 0)):
                with contextlib.suppress(OSError):  # another rank was faster, or the disk is read-only
                    (self._directory / name).unlink()
