"""Does a server grow with the lives of its ranks? Kills most of its ranks, again and again, and looks at what it occupies.

Starts the real SGLang server with four ranks, each with room for every expert, and a light load whose every token is
checked. In each round three ranks are killed at once with SIGKILL; the next round begins when all are back. Now and then
it counts files, sockets, descriptors, threads, memory and shared memory of every kind of process, and times a scrape of
/metrics. In the end the last quarter of these samples is compared with the first (see bench/soak/flatness.py).

Writes soak-cpu.json and .md. The exit code is 0 only if nothing grew, all deaths were survived, no request failed, no
token was wrong and nothing was left over.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.common.arguments import add_files, make_parser
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from bench.soak.flatness import allowance_of, judge_growth
from bench.soak.footprint import Places, measure
from bench.soak.light_load import make_light_load
from bench.soak.report import complaints, page
from eep.control.wire.client import ask_supervisor
from eep.control.wire.messages import AskOperation
from eep.drill.models.checkpoint import make_model
from eep.drill.sglang_server import FOUR_RANKS, Server
from eep.drill.story import Story

RANKS, AT_ONCE = 4, 3
ARGUMENTS = (*FOUR_RANKS, "--eep-redundant-experts", "48", "--eep-timeout-ms", "20000", "--enable-metrics")
_BACK_WITHIN = 240.0


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="eep-soak-") as place:
        results = soak(options, Path(place))
    text = page(results)
    print(text)
    if not options.no_files:
        write_results(options.results / "soak-cpu", results, text)
    return 1 if results["complaints"] else 0


def parse() -> argparse.Namespace:
    parser = make_parser(
        "bench.soak",
        __doc__,
        "examples:\n"
        "  python -m bench.soak                         1,000 deaths, about half an hour on two cores\n"
        "  python -m bench.soak --deaths 60 --no-files  does it work? a few minutes",
    )
    parser.add_argument("--deaths", type=int, default=1000, help="of ranks, three at a time (default: 1000)")
    parser.add_argument("--samples", type=int, default=60, help="how often to look, at most (default: 60)")
    parser.add_argument("--clients", type=int, default=2, help="how many stream at once (default: 2)")
    parser.add_argument("--seed", type=int, default=1, help="decides which ranks are killed (default: 1)")
    parser.add_argument("--minutes", type=float, default=120.0, help="begin no round after so many (default: 120)")
    add_files(parser)
    options = parser.parse_args()
    if options.deaths < 10 * AT_ONCE or options.samples < 8 or options.clients < 1:
        parser.error(f"--deaths must be at least {10 * AT_ONCE}, --samples 8, --clients 1")
    return options


def soak(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    places = Places(place)
    server = Server(make_model(place / "model"), ARGUMENTS, place / "log", places.environment(), places.private)
    told = provenance()
    with server:
        load = make_light_load(server.url, options.clients)
        story = Story(places.private, load, say=lambda text: None)
        try:
            story.wait_until_all_run(RANKS)
            with load:
                rounds, samples = _kill_and_look(options, server, story, places)
        finally:
            story.close()
    left = server.leftovers()
    verdicts = judge_growth([sample["figures"] for sample in samples])
    deaths = sum(len(each["killed"]) for each in rounds)
    results: dict[str, Any] = {
        **told,
        "wanted": options.deaths,
        "deaths": deaths,
        "seconds": round(sum(each["seconds"] for each in rounds), 1),
        "requests": len(load.answers),
        "failed": [answer.problem for answer in load.failed][:20],
        "wrong": len(load.wrong),
        "left_over": left,
        "verdicts": [{**asdict(each), "allowance": asdict(allowance_of(each.name))} for each in verdicts],
        "rounds": rounds,
        "samples": samples,
    }
    results["complaints"] = complaints(results)
    return results


def _kill_and_look(
    options: argparse.Namespace, server: Server, story: Story, places: Places
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rounds, and the samples between them. Ends early when the time is over, or if the ranks do not come back."""
    choose, began = random.Random(options.seed), time.monotonic()
    wanted = -(-options.deaths // AT_ONCE)
    every = max(1, wanted // options.samples)
    rounds: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    for number in range(wanted + 1):
        is_over = number == wanted or time.monotonic() - began > 60 * options.minutes
        if number % every == 0 or is_over:
            samples.append({"deaths": number * AT_ONCE, "figures": measure(server, places)})
            print(f"{time.monotonic() - began:7.0f} s: {number * AT_ONCE} deaths", flush=True)
        if is_over:
            break
        victims = sorted(choose.sample(range(RANKS), AT_ONCE))
        seconds = _kill(story, victims)
        if seconds is None:
            print(f"round {number}: not all ranks came back within {_BACK_WITHIN:g} s", flush=True)
            break
        rounds.append({"killed": victims, "seconds": round(seconds, 2)})
        _forgive(places.private, victims)
    return rounds, samples


def _kill(story: Story, victims: Sequence[int]) -> float | None:
    """How long it took until all ranks were back; None if they were not."""
    known, began = story.target.ranks(), time.monotonic()
    for rank in victims:
        pid = known[rank].pid
        assert pid is not None, f"rank {rank} runs, but has no process"
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    lost = {rank: known[rank].incarnation for rank in victims}
    return time.monotonic() - began if story.wait_until_back(RANKS, lost, _BACK_WITHIN) else None


def _forgive(directory: Path, ranks: Sequence[int]) -> None:
    """As an operator would: otherwise a rank that dies every few seconds rests longer each time, and is given up."""
    for rank in ranks:
        answer = ask_supervisor(directory, AskOperation(secrets.token_hex(8), "launch", rank))
        assert answer.ok, answer.body


if __name__ == "__main__":
    sys.exit(main())
