"""Addresses on a GPU that get their memory later: a graph that was captured over them runs over what is there then."""

from __future__ import annotations

import os

import pytest
import torch

from eep.data_plane.memory.vmm import DeviceMemory

MEBIBYTE = 1 << 20


@pytest.mark.parametrize("size", [MEBIBYTE, 32 * MEBIBYTE, 75 * MEBIBYTE + 512])
def test_a_graph_over_a_placeholder_runs_over_the_memory_that_it_becomes(size: int) -> None:
    place = DeviceMemory.placeholder(size)
    shown, total = place.bytes_at(0, size), torch.zeros(1, dtype=torch.int64, device="cuda")
    shown.fill_(1)  # the same few bytes, again and again

    def add_up() -> None:
        total.copy_(shown.sum(dtype=torch.int64).reshape(1))
        shown[-1:].fill_(9)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        add_up()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_up()
    memory = DeviceMemory.create("test", size)
    memory.bytes_at(0, size).fill_(3)
    descriptor, address = os.dup(memory.fd), shown.data_ptr()
    place.become(memory)
    graph.replay()
    torch.cuda.synchronize()
    assert (int(total), shown.data_ptr()) == (3 * size, address)
    another = DeviceMemory.adopt(descriptor, size)
    assert another.bytes_at(0, size)[-2:].tolist() == [3, 9], "others see what the graph wrote"
    with pytest.raises(ValueError, match="cannot take the place"):
        place.become(another)
    another.close()
    place.close()


def test_a_placeholder_takes_hardly_any_memory() -> None:
    torch.zeros(1, device="cuda")
    before = torch.cuda.mem_get_info()[0]
    place = DeviceMemory.placeholder(8 << 30)
    assert before - torch.cuda.mem_get_info()[0] < 128 * MEBIBYTE
    place.close()
