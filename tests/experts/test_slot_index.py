"""What a rank has noted of its slots, as its next life finds it."""

from __future__ import annotations

import numpy as np
import torch

from eep.experts.checksums import Checksums
from eep.experts.layout import ExpertLayout, ExpertMemory, TensorSpec
from eep.experts.placement.packing import EMPTY
from eep.experts.slot_index import SlotIndex, index_bytes

LAYERS, SLOTS, EXPERTS = 2, 3, 5
HELD = np.array([[4, EMPTY, 1], [0, 2, 3]], dtype=np.int64)


def experts() -> tuple[ExpertMemory, Checksums]:
    layout = ExpertLayout(LAYERS, SLOTS, (TensorSpec("w", (7,), torch.float32),))
    memory = ExpertMemory(layout, torch.zeros(layout.region_bytes, dtype=torch.uint8))
    sums = Checksums.none(LAYERS, EXPERTS)
    for layer, slot in np.argwhere(HELD != EMPTY).tolist():
        memory.tensors(layer)["w"][slot] = 10.0 * layer + HELD[layer, slot]
        sums.values[layer, HELD[layer, slot]] = memory.checksum(layer, slot)
        sums.known[layer, HELD[layer, slot]] = True
    return memory, sums


def test_the_next_life_finds_what_was_noted() -> None:
    memory, sums = experts()
    noted = np.zeros(index_bytes(LAYERS, SLOTS), dtype=np.uint8)
    index = SlotIndex(noted, LAYERS, SLOTS)
    index.clear()
    assert index.is_clear
    index.note(HELD, sums)
    held, found = SlotIndex(noted, LAYERS, SLOTS).verify(memory, EXPERTS)
    assert held.tolist() == HELD.tolist()
    assert found.known.tolist() == sums.known.tolist()
    assert found.values[found.known].tolist() == sums.values[sums.known].tolist()


def test_a_slot_with_other_bytes_holds_nothing() -> None:
    memory, sums = experts()
    index = SlotIndex(np.zeros(index_bytes(LAYERS, SLOTS), dtype=np.uint8), LAYERS, SLOTS)
    index.note(HELD, sums)
    memory.tensors(1)["w"][1, 3] += 1
    held, found = index.verify(memory, EXPERTS)
    assert held.tolist() == [[4, EMPTY, 1], [0, EMPTY, 3]]
    assert not found.known[1, 2]


def test_an_expert_that_there_is_not_is_none() -> None:
    memory, sums = experts()
    noted = np.zeros(index_bytes(LAYERS, SLOTS), dtype=np.uint8)
    SlotIndex(noted, LAYERS, SLOTS).note(HELD, sums)
    noted.view(np.int64)[0] = EXPERTS
    noted.view(np.int64)[2] = -7
    held, _ = SlotIndex(noted, LAYERS, SLOTS).verify(memory, EXPERTS)
    assert held.tolist() == [[EMPTY] * 3, [0, 2, 3]]


def test_a_slot_that_gets_another_expert_holds_nothing_until_it_has_its_checksum() -> None:
    """The order of the stores: whatever is there when the rank is killed in between is not taken for an expert."""
    _, sums = experts()
    noted = np.zeros(index_bytes(LAYERS, SLOTS), dtype=np.uint8)
    index = SlotIndex(noted, LAYERS, SLOTS)
    index.note(HELD, sums)
    stores: list[str] = []

    class Watched(np.ndarray):
        def __setitem__(self, key: object, value: object) -> None:
            super().__setitem__(key, value)  # type: ignore[index]
            stores.append("experts" if self.dtype == np.int64 else "sums")
            if stores[-1] == "sums":
                assert index._experts[0, 0] == EMPTY

    index._experts, index._sums = index._experts.view(Watched), index._sums.view(Watched)
    other = HELD.copy()
    other[0, 0] = 1
    index.note(other, sums)
    assert stores == ["experts", "sums", "experts"]


def test_a_process_that_has_had_the_slots_mapped_reads_what_was_noted() -> None:
    _, sums = experts()
    index = SlotIndex(np.zeros(index_bytes(LAYERS, SLOTS), dtype=np.uint8), LAYERS, SLOTS)
    index.note(HELD, sums)
    held, found = index.read(EXPERTS)
    assert held.tolist() == HELD.tolist()
    assert found.known.tolist() == sums.known.tolist()
    assert found.values[found.known].tolist() == sums.values[sums.known].tolist()
    assert index.read(4)[0].tolist() == [[EMPTY, EMPTY, 1], [0, 2, 3]], "there is no expert 4"
