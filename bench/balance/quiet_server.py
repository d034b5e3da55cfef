"""What a step costs more in a server that may move experts, while none moves: processor time of the added work over that of
the whole rank. Time by the clock would say more of other programs on a busy machine."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.balance.added_work import MODULE, read_work
from bench.common.server_switch import ServerSwitch
from eep.drill.load import Load
from eep.drill.models.checkpoint import make_model
from eep.drill.sglang_server import FOUR_RANKS, Server

RANKS = 4
# They look often, and never find that a move is worth it.
_ARGUMENTS = (
    *(*FOUR_RANKS, "--eep-timeout-ms", "10000", "--enable-eplb", "--eplb-rebalance-num-iterations", "200"),
    *("--eplb-min-rebalancing-utilization-threshold", "0"),
)
_WITHIN = 120.0


def measure_quiet(seconds: float, clients: int = 8) -> list[dict[str, Any]]:
    """A line per rank, over ``seconds`` of load. RuntimeError if an answer is wrong."""
    choose = random.Random(7)
    prompts = [[choose.randrange(3, 250) for _ in range(choose.randrange(4, 40))] for _ in range(8)]
    with tempfile.TemporaryDirectory(prefix="eep-bench-") as place:
        model, switch = make_model(Path(place) / "model"), ServerSwitch(Path(place) / "switch", MODULE)
        server = Server(model, _ARGUMENTS, Path(place) / "log", switch.environment(), directory=Path(place) / "d")
        with server:
            wanted = [list(each) for each in Load.with_reference(server.url, prompts).wanted]
            load = Load(server.url, prompts, wanted, clients)
            with load:
                before = _wait_for(switch.folder, 200)
                time.sleep(seconds)
                after = read_work(switch.folder, RANKS)
            if load.failed or load.wrong:
                raise RuntimeError(f"{len(load.failed)} requests failed, {len(load.wrong)} were answered wrong")
    assert after is not None
    return [_line(rank, *pair) for rank, pair in enumerate(zip(before, after, strict=True))]


def _wait_for(folder: Path, steps: int) -> list[dict[str, float]]:
    """What ranks have written once each has run so many steps."""
    end = time.monotonic() + _WITHIN
    while time.monotonic() < end:
        found = read_work(folder, RANKS)
        if found is not None and all(each["steps"] >= steps for each in found):
            return found
        time.sleep(0.1)
    raise TimeoutError(f"no {steps} steps within {_WITHIN:.0f} s")


def _line(rank: int, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    steps, wall = after["steps"] - before["steps"], after["at"] - before["at"]
    spent = {kind: after[kind] - before[kind] for kind in ("counting", "asking", "thread")}
    return {
        "rank": rank,
        "steps": int(steps),
        "step_ms": 1e3 * wall / steps,
        "processor_ms_per_step": 1e3 * (after["all"] - before["all"]) / steps,
        **{f"{kind}_us_per_step": 1e6 * seconds / steps for kind, seconds in spent.items()},
        "share_of_a_step_percent": 100 * sum(spent.values()) / (after["all"] - before["all"]),
    }
