"""Memory of a GPU of which parts are given up and had again, under a graph that was captured over it."""

from __future__ import annotations

import os

import pytest
import torch

from eep.data_plane.memory import adopt, descriptors_of
from eep.data_plane.memory.parted import NONE, PartedKind

MEBIBYTE = 1 << 20
SIZE = 600 * MEBIBYTE + 512
# The driver's unit is 2 MiB: the first part begins at 102 MiB, and reaches to 302.
KIND = PartedKind(((101 * MEBIBYTE, 200 * MEBIBYTE), (301 * MEBIBYTE, 99 * MEBIBYTE), (500 * MEBIBYTE, 50 * MEBIBYTE)))


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_memory_is_free_for_others_and_a_graph_runs_over_what_there_is() -> None:
    memory = KIND.create("test", SIZE)
    shown, total = memory.bytes_at(0, SIZE), torch.zeros(1, dtype=torch.int64, device="cuda")
    whole, first = memory.bytes_at(0, 100 * MEBIBYTE), memory.bytes_at(101 * MEBIBYTE, 200 * MEBIBYTE)
    assert not shown.any(), "new memory is zeroed"
    shown.fill_(1)

    def add_up() -> None:
        total.copy_(whole.sum(dtype=torch.int64).reshape(1))
        first.add_(1)  # into the void while it is given up

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        add_up()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_up()
    before = free()
    memory.give_up(100 * MEBIBYTE, 500 * MEBIBYTE)
    gained = free() - before
    assert 0.95 * memory.gain_of(0, SIZE) - 40 * MEBIBYTE <= gained <= memory.gain_of(0, SIZE)
    assert memory.gain_of(0, SIZE) >= 340 * MEBIBYTE
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert int(total) == 100 * MEBIBYTE
    assert bool((shown[400 * MEBIBYTE : 500 * MEBIBYTE] == 1).all()), "what lies between stays"
    memory.back(101 * MEBIBYTE, 2 * MEBIBYTE)
    assert not first[-2 * MEBIBYTE :].any(), "all of the first part is new"
    graph.replay()
    torch.cuda.synchronize()
    assert bool((first[2 * MEBIBYTE :] == 1).all())
    assert int(total) == 100 * MEBIBYTE
    memory.close()


def test_another_process_would_map_what_lasts() -> None:
    memory = KIND.create("test", SIZE)
    memory.bytes_at(0, SIZE).fill_(5)
    theirs = adopt(KIND, [os.dup(each) for each in descriptors_of(memory)], SIZE)
    seen = theirs.bytes_at(0, SIZE)
    assert bool((seen[: 101 * MEBIBYTE] == 5).all())
    assert bool((seen[400 * MEBIBYTE : 500 * MEBIBYTE] == 5).all())
    seen[102 * MEBIBYTE : 400 * MEBIBYTE].fill_(6)
    torch.cuda.synchronize()
    assert bool((memory.bytes_at(102 * MEBIBYTE, 298 * MEBIBYTE) == 5).all())
    theirs.close()
    memory.close()


def test_a_placeholder_becomes_what_another_had() -> None:
    memory, place = KIND.create("test", SIZE), KIND.placeholder(SIZE)
    shown = place.bytes_at(0, SIZE)
    shown.fill_(1)
    memory.bytes_at(0, SIZE).fill_(3)
    memory.give_up(500 * MEBIBYTE, 50 * MEBIBYTE)
    place.become(memory)
    torch.cuda.synchronize()
    assert bool((shown[: 500 * MEBIBYTE] == 3).all())
    assert bool((shown[550 * MEBIBYTE :] == 3).all())
    assert [each == NONE for each in place.descriptors].count(True) == 1
    with pytest.raises(ValueError, match="cannot take the place"):
        place.become(KIND.create("test", SIZE))
    place.close()
