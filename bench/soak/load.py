"""Does a busy machine make a server lose ranks? Runs processes that compute beside it, and counts what should not be.

Starts the real SGLang server with four ranks and its default deadlines, and a light load whose every token is checked. Then
starts the busy processes. Nothing is killed and nothing is stopped, so every rank that is lost was lost for no reason.

Writes soak-load-cpu.json and .md. The exit code is 0 only if no rank was lost, suspected or said to stand still, no request
failed, no token was wrong and nothing was left over. Its processes stay in the cgroup of this one, and all end with it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.common.arguments import add_files, make_parser
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from bench.soak.burners import Burners
from bench.soak.footprint import Places
from bench.soak.light_load import make_light_load
from bench.soak.load_report import complaints, page
from bench.soak.losses import losses_after
from eep.drill.load import Load
from eep.drill.models.checkpoint import make_model
from eep.drill.sglang_server import FOUR_RANKS, Server
from eep.drill.story import Story
from eep.observe.event_log import read_events

RANKS = 4
_LOOKS_EVERY_S = 10.0
_TELLS_EVERY = 6
_ENDS_WITHIN_S = 600.0
"""For answers that are under way in the end: the busy processes have ended by then."""


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="eep-soak-") as place:
        results = soak(options, Path(place))
    text = page(results)
    print(text)
    if not options.no_files:
        write_results(options.results / "soak-load-cpu", results, text)
    return 1 if results["complaints"] else 0


def parse() -> argparse.Namespace:
    parser = make_parser(
        "bench.soak.load",
        __doc__,
        "examples:\n"
        "  python -m bench.soak.load                          an hour beside 15 busy processes\n"
        "  python -m bench.soak.load --minutes 1 --no-files   does it work? two minutes with the start",
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="beside busy processes (default: 60)")
    parser.add_argument("--burners", type=int, default=15, help="how many processes compute (default: 15)")
    parser.add_argument("--clients", type=int, default=2, help="how many stream at once (default: 2)")
    add_files(parser)
    options = parser.parse_args()
    if options.minutes <= 0 or options.burners < 1 or options.clients < 1:
        parser.error("--minutes must be more than 0, --burners and --clients at least 1")
    return options


def soak(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    told, places = provenance(), Places(place)
    server = Server(make_model(place / "model"), FOUR_RANKS, place / "log", places.environment(), places.private)
    with server:
        load = make_light_load(server.url, options.clients)
        story = Story(places.private, load, say=lambda text: None)
        try:
            if not story.wait_until_all_run(RANKS):
                raise RuntimeError(f"not all ranks ran before the load\n{server.log[-3000:]}")
            before, began, started = _lives(story), time.time(), time.monotonic()
            load.start()
            with Burners(options.burners) as burners:
                samples = _watch(load, started, 60 * options.minutes)
                burners_left = burners.alive
            ended = time.monotonic()
            load.stop(_ENDS_WITHIN_S)
            lines = list(read_events(places.private / "events.jsonl"))
            losses = losses_after(lines, began, before, _lives(story))
        finally:
            story.close()
    averages = [sample["load_average"] for sample in samples]
    results: dict[str, Any] = {
        **told,
        **asdict(losses),
        "seconds": round(ended - started, 1),
        "burners": options.burners,
        "burners_left": burners_left,
        "clients": options.clients,
        "load_median": statistics.median(averages),
        "load_most": max(averages),
        "requests": len(load.answers),
        "failed": [answer.problem for answer in load.failed][:20],
        "wrong": len(load.wrong),
        "largest_gap": round(load.largest_gap(started, ended), 2),
        "left_over": server.leftovers(),
        "samples": samples,
    }
    results["complaints"] = complaints(results)
    return results


def _watch(load: Load, started: float, seconds: float) -> list[dict[str, float]]:
    """The load of the machine, and how far the clients are, until the time is over."""
    samples: list[dict[str, float]] = []
    while (left := started + seconds - time.monotonic()) > 0:
        time.sleep(min(left, _LOOKS_EVERY_S))
        answers, average = len(load.answers), round(os.getloadavg()[0], 2)
        samples.append({"seconds": round(time.monotonic() - started, 1), "load_average": average, "answers": answers})
        if len(samples) % _TELLS_EVERY == 0:
            print(f"{samples[-1]['seconds']:7.0f} s: {answers} answers, load average {average}", flush=True)
    return samples


def _lives(story: Story) -> dict[int, int]:
    return {rank: each.incarnation for rank, each in story.target.ranks().items()}


if __name__ == "__main__":
    sys.exit(main())
