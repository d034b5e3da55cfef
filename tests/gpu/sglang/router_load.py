"""SGLang's router as a decode step has it, on a GPU that three other processes keep busy. Prints what it did to rows.

Run under MPS: ``python -m tests.gpu.sglang.router_load SECONDS``.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from multiprocessing.synchronize import Event

import torch

from tests.gpu.sglang.test_routers import ROWS, Router, launched

IN_A_GRAPH, REPLAYS_AT_ONCE = 200, 5
NOISES = ("products", "fills", "sums at random places")


def make_noise(kind: str, over: Event) -> None:
    matrix = torch.randn(4096, 4096, device="cuda")
    memory, ones = torch.empty(1 << 27, device="cuda"), torch.ones(1 << 24, device="cuda")
    places = torch.randint(0, 1 << 27, (1 << 24,), device="cuda")
    while not over.is_set():
        for _ in range(10):
            if kind == "products":
                torch.mm(matrix, matrix)
            elif kind == "fills":
                memory.fill_(1.0)
            else:
                memory.index_add_(0, places, ones)
        torch.cuda.synchronize()


def count_wrong_rows(seconds: float) -> dict[str, int]:
    """The bias is garbage, then filled with zeros, as SGLang does for each layer, then read by the router."""
    router, graph = Router(), torch.cuda.CUDAGraph()
    router.pick()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(IN_A_GRAPH):
            router.bias.copy_(router.garbage)
            router.scores.add_(0)
            router.bias.zero_()
            router.pick()
    router.wrong.zero_()
    launches, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(REPLAYS_AT_ONCE):
            graph.replay()
        torch.cuda.synchronize()
        launches += REPLAYS_AT_ONCE * IN_A_GRAPH
    return {"rows": launches * ROWS, "wrong": router.wrong_rows()}


def main(seconds: float) -> None:
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    beside = [context.Process(target=make_noise, args=(kind, over), daemon=True) for kind in NOISES]
    for process in beside:
        process.start()
    time.sleep(8)  # until they have begun: they only make it likelier
    found = {}
    for early in (True, False):
        with launched(early):
            found["early" if early else "usual"] = count_wrong_rows(seconds)
    over.set()
    for process in beside:
        process.join(30)
    print(json.dumps(found))


if __name__ == "__main__":
    main(float(sys.argv[1]))
