"""Records what the gates of a real server pick while what it reads changes: the load of ``bench.balance`` called *recorded*.

The SGLang server with four ranks and a random model of 8 layers with 64 experts. It reads English, Python, C++ and figures
from this repository: mostly one of them, and which one changes now and then. Between two looks every rank writes down how
often its gates have picked each expert so far. Writes recorded_loads.npz beside this file.

This file is an SGLang plugin of its own, too, which puts the writing into the ranks.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bench.balance.traces import RECORDED
from bench.common.drilled_server import say
from bench.common.server_switch import ServerSwitch, find_switch
from eep.drill.load import ask
from eep.drill.models.checkpoint import write_model
from eep.drill.models.model_sizes import Size
from eep.drill.sglang_server import FOUR_RANKS, Server

MODULE = "bench.balance.record"
RANKS = 4
SIZE = Size(64, 6, 8, 256, 64, 4, 2, 64, spread=0.2)
_ROOT = Path(__file__).resolve().parents[2]
_TOPICS = {
    "English": "docs/**/*.md",
    "Python": "eep/**/*.py",
    "C++": "eep_cuda/**/*.c*",
    "figures": "bench/results/*.json",
}
_TOPIC_LASTS, _SHARE_OF_TOPIC = 4, 0.85
"""Looks, and how many of the prompts are of it."""
_PROMPTS, _LENGTH, _TOKENS = 16, 256, 4
_WITHIN = 60.0
_ARGUMENTS = (
    *(*FOUR_RANKS, "--eep-timeout-ms", "20000", "--enable-eplb"),
    *("--eplb-rebalance-num-iterations", "1000000", "--eplb-min-rebalancing-utilization-threshold", "0"),
)


def register() -> None:
    """In every process of the server."""
    found = find_switch()
    if found is None:
        return
    switch, folder = found
    from eep.experts.balancing.balancer import Balancer

    count, written = Balancer.stepped, [0]

    def stepped(balancer: Balancer) -> None:
        count(balancer)
        if switch[0] != written[0]:
            written[0] = switch[0]
            path = _counts(folder, balancer._rank, written[0])
            np.save(path.with_suffix(".part.npy"), balancer._counted())
            path.with_suffix(".part.npy").rename(path)

    Balancer.stepped = stepped  # type: ignore[method-assign]


def _counts(folder: Path, rank: int, look: int) -> Path:
    return folder / f"counts-{rank}-{look}.npy"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--looks", type=int, default=32, help="how often the counts are written down (default: 32)")
    parser.add_argument("--out", type=Path, default=RECORDED, help="the file (default: the one that is here)")
    options = parser.parse_args()
    if not 1 <= options.looks <= 254:
        parser.error("--looks must be from 1 to 254")
    with tempfile.TemporaryDirectory(prefix="eep-bench-") as place:
        loads = record(Path(place), options.looks)
    np.savez_compressed(options.out, loads=loads)
    say(f"wrote {options.out.name}: {loads.shape[0]} looks, {loads.shape[1]} layers, {loads.shape[2]} experts")
    return 0


def record(place: Path, looks: int) -> np.ndarray:
    """``[looks, layers, experts]``: how often each was picked since the look before."""
    model, switch = write_model(place / "model", SIZE), ServerSwitch(place / "switch", MODULE)
    server = Server(model, _ARGUMENTS, place / "log", switch.environment(), directory=place / "d")
    sums = []
    with server, ThreadPoolExecutor(8) as clients:
        for look, prompts in zip(range(1, looks + 2), prompts_of_looks(), strict=False):
            asked = [clients.submit(ask, server.url, prompt, _TOKENS) for prompt in prompts]
            switch.turn(look)  # while requests run: ranks write when they begin a step
            if problems := [each.result().problem for each in asked if each.result().problem]:
                raise RuntimeError(f"look {look}: {problems[0]}")
            sums.append(sum(_read(_counts(switch.folder, rank, look)) for rank in range(RANKS)))
            say(f"look {look}: {int(sums[-1].sum())} picks so far")
    return np.diff(np.stack(sums), axis=0).astype(np.uint32)


def prompts_of_looks() -> Iterator[list[list[int]]]:
    """Without end; the same at every call."""
    choose = random.Random(5)
    texts = {
        topic: "\n".join(path.read_text() for path in sorted(_ROOT.glob(pattern))).encode()
        for topic, pattern in _TOPICS.items()
    }
    look = 0
    while True:
        topic = list(_TOPICS)[look // _TOPIC_LASTS % len(_TOPICS)]
        kinds = [topic if choose.random() < _SHARE_OF_TOPIC else choose.choice(list(_TOPICS)) for _ in range(_PROMPTS)]
        begins = [(kind, choose.randrange(len(texts[kind]) - _LENGTH)) for kind in kinds]
        yield [list(texts[kind][begin : begin + _LENGTH]) for kind, begin in begins]
        look += 1


def _read(path: Path) -> np.ndarray:
    """What a rank writes when it begins its next step."""
    end = time.monotonic() + _WITHIN
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path.name} was not written within {_WITHIN:.0f} s")
        time.sleep(0.05)
    return np.asarray(np.load(path), dtype=np.int64)


if __name__ == "__main__":
    sys.exit(main())
