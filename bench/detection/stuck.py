"""Measures how soon a rank is out that lives and does not get on: one that is stopped, and one that sleeps or computes
without end between two steps.

The real SGLang server with four ranks and its default deadlines, under a load whose every token is checked. Ranks are stopped
with SIGSTOP, and made to sleep or to spin at a fault point; none of that ends by itself. Times are from then on.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.common.arguments import add_files, make_parser
from bench.common.drilled_server import choose_prompts, describe_requests, describe_server, exit_code, origin_lines, say
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from bench.detection.report import middle_and_most
from bench.failover.kills import need_spares, victims
from eep.drill.devices import DEVICES, Device
from eep.drill.load import Load
from eep.drill.models.checkpoint import make_model
from eep.drill.sglang_server import FOUR_RANKS, Server
from eep.drill.story import Fault, Story

RANKS = 4
TOKENS = 32
POINT = "step.trusted"
"""Where a rank hangs: it has judged a step and not yet begun the next."""
FOR_EVER_MS = 3_600_000
CASES = {
    "stopped": "is stopped (SIGSTOP)",
    "sleep": "sleeps between two steps",
    "spin": "computes without end between two steps",
}
"""All but the first are faults that a rank does to itself."""
TIMES = {"noticed": "it is out", "running": "the others run again", "rejoined": "it is back"}


def main() -> int:
    options = parse()
    device = DEVICES[options.device]
    with tempfile.TemporaryDirectory(prefix="eep-bench-") as place, device.prepared() as needed:
        return measure(options, Path(place), device, needed)


def parse() -> argparse.Namespace:
    parser = make_parser(
        "bench.detection.stuck",
        __doc__,
        "Files: stuck-DEVICE.json and stuck-DEVICE.md.\n\n"
        "examples:\n"
        "  python -m bench.detection.stuck                         twenty of each, about seven minutes\n"
        "  python -m bench.detection.stuck --times 1 --no-files    does it work? two minutes",
    )
    parser.add_argument("--device", choices=sorted(DEVICES), default="cpu", help="where the ranks run (default: cpu)")
    parser.add_argument(
        "--hang-timeout", type=float, help="--eep-hang-timeout-s of the server (default: the server's own)"
    )
    parser.add_argument("--times", type=int, default=20, help="how often each case is tried (default: 20)")
    parser.add_argument("--clients", type=int, default=4, help="how many stream at once (default: 4)")
    parser.add_argument("--seed", type=int, default=1, help="decides the order of ranks (default: 1)")
    add_files(parser)
    options = parser.parse_args()
    if options.times < 1 or options.clients < 1:
        parser.error("--times and --clients must be at least 1")
    return options


def measure(options: argparse.Namespace, place: Path, device: Device, needed: Mapping[str, str]) -> int:
    head = provenance()
    before = round(os.getloadavg()[0], 2)
    arguments = [*FOUR_RANKS, "--eep-faults", "on", "--incremental-streaming-output"]
    if options.hang_timeout is not None:
        arguments += ["--eep-hang-timeout-s", str(options.hang_timeout)]
    if device.shared:
        arguments += ["--eep-spares", str(RANKS)]
    say("making a small random model, and starting SGLang with four ranks; this takes about a minute")
    model = make_model(place / "model", size=device.model)
    server = Server(model, arguments, place / "server.log", needed, place / "d", device)
    with server:
        prompts = choose_prompts(server.url, random.Random(options.seed), TOKENS, device)
        wanted = Load.with_reference(server.url, prompts, tokens=TOKENS).wanted
        load = Load(server.url, prompts, wanted, options.clients)
        story = Story(place / "d", load, say=lambda text: None)
        story.wait_until_all_run(RANKS)
        with load:
            order = victims(RANKS, options.times, options.seed)
            for first in range(0, len(order), RANKS):
                for case in CASES:
                    if device.shared:
                        need_spares(story.target, RANKS)  # each of the victims has one of its own
                    for rank in order[first : first + RANKS]:
                        say(str(lose(story, case, rank)))
        story.close()
    left = server.leftovers()
    head["setting"] = {
        **{name: getattr(options, name) for name in ("device", "hang_timeout", "times", "clients", "seed")},
        **describe_server(device, arguments),
        "load_average": [before, round(os.getloadavg()[0], 2)],
    }
    head["requests"] = describe_requests(load)
    faults = [
        {"case": fault.kind, "rank": fault.rank, **{name: round(getattr(fault, name), 4) for name in TIMES}}
        for fault in story.faults
    ]
    told = {"faults": faults}
    text = page(head, told)
    say(text)
    if not options.no_files:
        write_results(options.results / f"stuck-{options.device}", {**head, **told}, text)
    return exit_code(load, left)


def lose(story: Story, case: str, rank: int) -> Fault:
    """RuntimeError if the rank is not out, or not back, in time."""
    fault = story.stop(rank) if case == "stopped" else get_stuck(story, rank, case)
    if not (story.wait_until_noticed(fault) and story.wait_until_all_run(RANKS)):
        raise RuntimeError(f"rank {rank} was lost and did not come back")
    return fault


def get_stuck(story: Story, rank: int, how: str) -> Fault:
    story.target.arm(rank, POINT, how, sleep_ms=FOR_EVER_MS)
    if not story.target.wait_until_fired(rank, POINT, 60.0):
        raise RuntimeError(f"rank {rank} took no step within a minute")
    line = [each for each in story.target.fired() if each.rank == rank][-1]
    fault = Fault(rank, how, line.time - time.time() + time.monotonic())
    story.faults.append(fault)
    return fault


def page(head: dict[str, Any], told: dict[str, Any]) -> str:
    setting, requests = head["setting"], head["requests"]
    lines = [
        "# How soon a rank is out that is stuck",
        "",
        *origin_lines(head),
        f"Load average {setting['load_average'][0]} before and {setting['load_average'][1]} at the end. Four ranks, "
        f"{setting['clients']} clients, default deadlines.",
        "",
        f"{requests['answered']} requests, {requests['failed']} failed, {requests['wrong']} with a wrong token.",
        "",
        f"| milliseconds, median (largest) | times | {' | '.join(TIMES.values())} |",
        f"|---|---:|{'---:|' * len(TIMES)}",
    ]
    for case, text in CASES.items():
        of_case = [fault for fault in told["faults"] if fault["case"] == case]
        cells = (middle_and_most([1000 * fault[name] for fault in of_case]) for name in TIMES)
        lines.append(f"| a rank {text} | {len(of_case)} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
