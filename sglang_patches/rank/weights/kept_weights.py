"""The weights of this rank in memory that outlives the process, and what its last life has left.

    experts      the slots, in memory of the rank's own; ``slots`` says which expert is in which
    dense-...    everything else, once for all ranks of the device that have the same, named by its content
    weights      written last: what the rest is, and of which model

A life takes over all of it or nothing. It verifies every byte before the first step. A slot that is not as it should be holds
nothing, and is repaired when the rank joins; if anything else is wrong, this life forgets what was kept and ends, and the
next one loads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from eep.anchor.anchor import drop, list_held
from eep.data_plane.memory import Memory, MemoryKind, memory_of, memory_with
from eep.data_plane.memory.shm import SharedMemory
from eep.errors import EepError, PeerUnreachable
from eep.experts.layout import ExpertLayout, ExpertMemory
from eep.experts.slot_index import SlotIndex, index_bytes
from eep.experts.slot_room import loose_ranges
from sglang_patches.rank.rank_anchor import common_anchor, describe_life, lock_within, own_anchor
from sglang_patches.rank.weights.model_tensors import TensorList, Unfit, bind, fill, find_scalars, lay_out, verify

logger = logging.getLogger(__name__)
WEIGHTS, EXPERTS, SLOTS = "weights", "experts", "slots"
_DENSE, _LOCK = "dense-", "dense.lock"
_LOCKED_WITHIN = 120.0
_NOTHING = b"-"
_MOST_TENSORS = 250
"""Each makes a part of its own, and a packet takes 253 descriptors."""


class WeightsRecord(msgspec.Struct, frozen=True):
    """What was kept, and the model that it is of."""

    identity: str
    dense: TensorList
    scalars: dict[str, dict[str, float | bool]]


@dataclass(frozen=True)
class KeptExperts:
    memory: ExpertMemory
    shared: Memory
    index: SlotIndex
    lasting_slots: int
    """How many slots outlive this process, too. What the others hold is gone with it where their memory is their own."""


@dataclass(frozen=True)
class Inheritance:
    """What the last life of this rank has left."""

    record: WeightsRecord
    dense: torch.Tensor

    def give_to(self, model: torch.nn.Module) -> None:
        """Everything but the experts. Unfit if it does not fit."""
        bind(self.record.dense, self.dense, model)
        modules = dict(model.named_modules())
        for path, scalars in self.record.scalars.items():
            for name, value in scalars.items():
                setattr(modules[path], name, value)


def find_inheritance(identity: str, device: str) -> Inheritance | None:
    """None if there is nothing that this life can use. The log says why, if there is something."""
    found = own_anchor().find(own_anchor().rank, WEIGHTS)
    if found is None:
        return None
    held, descriptor = found
    os.close(descriptor)
    record = _read_record(own_anchor().rank)
    if record is None:
        return None
    try:
        if record.identity != identity:
            raise Unfit("they are of another model, or of another version of it")
        if not _has_experts():
            raise Unfit("there are no experts among them")
        dense = _find_dense(record.dense, device)
        if dense is None:
            raise Unfit("no process holds them any more")
        verify(record.dense, dense)
    except (EepError, Unfit) as error:
        logger.warning("the weights that %s has left are not used: %s", describe_life(held.incarnation), error)
        return None
    _put(WEIGHTS, msgspec.json.encode(record))
    logger.info("this life takes over the weights of %s", describe_life(held.incarnation))
    return Inheritance(record, dense)


def forget() -> None:
    """What was kept no longer counts, for this life or for a later one."""
    _put(WEIGHTS, _NOTHING)


def take_experts(layout: ExpertLayout, device: str, usual: int | None = None) -> KeptExperts:
    """The memory that the last life of this rank had, if it is of the same size. ``usual``: how many slots always have
    memory; None for all."""
    kind = expert_memory_kind(layout, device, usual)
    shared, _ = own_anchor().attach(EXPERTS, layout.region_bytes, kind)
    noted, life = own_anchor().attach(SLOTS, index_bytes(layout.layers, layout.slots), SharedMemory)
    index = SlotIndex(noted.bytes_at(0, noted.size).numpy(), layout.layers, layout.slots)
    if life is None:
        index.clear()
    lasting = layout.slots if usual is None or kind is SharedMemory else usual
    return KeptExperts(ExpertMemory(layout, shared.bytes_at(0, layout.region_bytes)), shared, index, lasting)


def expert_memory_kind(layout: ExpertLayout, device: str, usual: int | None) -> MemoryKind:
    """Of which the slots beyond the usual can be given up. SystemExit if it had too many parts to hand to a peer at once."""
    if usual is None or usual >= layout.slots:
        return memory_of(device)
    tensors = layout.layers * len(layout.tensors)
    if device != "cpu" and tensors > _MOST_TENSORS:
        raise SystemExit(
            f"--eep-on-lost-coverage make-room: this model has {tensors} expert tensors, and on a GPU at most "
            f"{_MOST_TENSORS} can get room for more slots: use refuse or mask"
        )
    return memory_with(device, loose_ranges(layout, usual), backed=False)


def keep(model: torch.nn.Module, experts: KeptExperts, identity: str) -> None:
    """Move everything but the experts into memory that outlives this process, and say that all is there. If another rank of
    this device has the same, this model uses that."""
    device = experts.memory.region.device.type
    try:
        listed = lay_out(model, {experts.memory.region.untyped_storage().data_ptr()}, device)
        with _locked():
            region = _find_dense(listed, device)
            if region is None:
                memory = memory_of(device).create("eep-dense", listed.region_bytes)
                region = memory.bytes_at(0, listed.region_bytes)
                fill(listed, region, model)
                common_anchor().hold(_dense_name(listed, device), memory)
            bind(listed, region, model)
            _put(WEIGHTS, msgspec.json.encode(WeightsRecord(identity, listed, find_scalars(model))))
    except (Unfit, EepError) as error:
        logger.warning("the weights of this rank end with its process: %s", error)


def make_way() -> None:
    """Have what was kept let go: this life loads, and may need the memory. What other ranks use stays."""
    rank = own_anchor().rank
    with suppress(EepError), _locked():  # without a keeper nothing is held
        held = list_held(own_anchor().directory)
        for each in held:
            if each.rank == rank and each.name.partition(".")[0] in (WEIGHTS, EXPERTS, SLOTS):
                drop(own_anchor().directory, rank, each.incarnation, each.name)
        records = [_read_record(each.rank) for each in held if each.name == WEIGHTS and each.rank != rank]
        used = {record.dense.digest for record in records if record is not None}
        for each in held:
            if each.name.startswith(_DENSE) and each.name.rpartition("-")[2] not in used:
                drop(own_anchor().directory, each.rank, each.incarnation, each.name)


@contextmanager
def _locked() -> Iterator[None]:
    """One rank at a time finds out who uses what. EepError if another one is at it for too long."""
    with (own_anchor().directory / _LOCK).open("w") as lock:
        if not lock_within(lock, _LOCKED_WITHIN):
            raise EepError(f"another rank keeps {_LOCK} for more than {_LOCKED_WITHIN:.0f} s")
        yield


def _read_record(rank: int) -> WeightsRecord | None:
    """What a rank has said of its weights; None if that is nothing, or nothing that can be read."""
    written = _read(rank, WEIGHTS)
    if written is None or written == _NOTHING:
        return None
    try:
        return msgspec.json.decode(written, type=WeightsRecord)
    except msgspec.DecodeError as error:
        logger.warning("what is held as %s of rank %d cannot be read: %s", WEIGHTS, rank, error)
        return None


def _read(rank: int, name: str) -> bytes | None:
    """A copy of what is held in host memory; None if there is nothing."""
    found = own_anchor().find(rank, name)
    if found is None:
        return None
    held, descriptor = found
    try:
        memory = SharedMemory.adopt(descriptor, held.size)
    except PeerUnreachable:
        return None
    content = memory.bytes_at(0, held.size).numpy().tobytes()
    memory.close()
    return content


def _find_dense(listed: TensorList, device: str) -> torch.Tensor | None:
    name = _dense_name(listed, device)
    memory, _ = common_anchor().inherit(name, listed.region_bytes, memory_of(device))
    if memory is None:
        return None
    common_anchor().hold(name, memory)
    return memory.bytes_at(0, listed.region_bytes)


def _dense_name(listed: TensorList, device: str) -> str:
    number = torch.cuda.current_device() if device == "cuda" else 0
    return f"{_DENSE}{number}-{listed.digest}"


def _put(name: str, content: bytes) -> None:
    memory = SharedMemory.create(f"eep-{name}", len(content))
    memory.bytes_at(0, len(content)).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    own_anchor().hold(name, memory)


def _has_experts() -> bool:
    written = _read(own_anchor().rank, SLOTS)
    if written is None:
        return False
    noted = np.frombuffer(written, dtype=np.uint8)
    return not SlotIndex(noted, 1, len(noted) // index_bytes(1, 1)).is_clear
