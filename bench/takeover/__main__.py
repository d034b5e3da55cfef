"""How soon a lost rank is back as a spare, how much a server still does while ranks are lost all the time, and whether
anything grows.

Starts the server with four ranks and a spare for each, and drives a load whose every token is checked. Its phases: calm;
*kills*, each when all spares are ready; a *storm*, with a kill every --every seconds whether they are ready or not; and with
--spare-kills, a storm in which only spares are killed, so that all it costs is to prepare them. Told are the tokens per
second of calm and storms, in turns; how they go after a kill, and the steps of the ranks that stay; the time from each kill
until the rank is back; and what the processes hold before the first kill, after the single ones, and after each storm.

When --seconds are over, no further storm begins, and one that has begun kills no more.

Writes takeover-DEVICE.json and .md into --out. The exit code is 0 only if no request failed, no token was wrong and nothing
was left over.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.common.drilled_server import (
    RESULTS,
    choose_prompts,
    describe_requests,
    describe_server,
    exit_code,
    say,
)
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from bench.failover.kills import kill_now, need_spares
from bench.takeover.holdings import Holdings, holdings_of
from bench.takeover.phases import Phase, calm, storm, storm_of_spares
from bench.takeover.report import TIMES, page
from bench.takeover.step_notes import StepNotes
from eep.drill.devices import DEVICES, Device
from eep.drill.load import Load
from eep.drill.models.checkpoint import make_model
from eep.drill.sglang_server import FOUR_RANKS, Server
from eep.drill.story import Fault, Story

RANKS = 4
WITHIN = 240.0
"""Seconds for a rank to be back, and for spares to be ready."""


def main() -> int:
    options = parse()
    gc.disable()  # or the clients stand still at times, while it looks through the answers that there are
    device = DEVICES[options.device]
    with tempfile.TemporaryDirectory(prefix="eep-bench-") as place, device.prepared() as needed:
        return measure(options, Path(place), device, needed)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=sorted(DEVICES), default="cpu", help="where the ranks run (default: cpu)")
    add("--kills", type=int, default=20, help="how many, each when all spares are ready (default: 20)")
    add("--storms", type=int, default=2, help="how many storms, with a calm before each (default: 2)")
    add("--storm-kills", type=int, default=8, help="kills in a storm (default: 8)")
    add("--spare-kills", type=int, default=0, help="kills of spares, after the storms (default: 0)")
    add("--every", type=float, default=2.0, help="seconds between kills in a storm (default: 2)")
    add("--calm", type=float, default=8.0, help="seconds of calm before a storm (default: 8)")
    add("--spares", type=int, default=RANKS, help=f"how many to keep (default: {RANKS})")
    add(
        "--redundant-experts",
        type=int,
        help="slots beyond one for each expert (default: the server's). Without enough of them each loss brings experts in",
    )
    add("--clients", type=int, default=16, help="how many stream at once (default: 16)")
    add(
        "--tokens",
        type=int,
        default=64,
        help="the length of the longest answers; the shortest have half of that (default: 64)",
    )
    add(
        "--seconds",
        type=float,
        default=math.inf,
        help="kill no rank later than this after the start (default: no limit)",
    )
    add("--seed", type=int, default=1, help="decides the order of ranks (default: 1)")
    add("--out", type=Path, default=RESULTS, help="where the results go (default: bench/results)")
    options = parser.parse_args()
    least = {
        "kills": 1,
        "storms": 0,
        "storm_kills": 1,
        "spare_kills": 0,
        "every": 0.1,
        "calm": 1,
        "spares": 1,
        "clients": 1,
        "tokens": 2,
    }
    for name, value in least.items():
        if getattr(options, name) < value:
            parser.error(f"--{name.replace('_', '-')} must be at least {value}, got {getattr(options, name)}")
    return options


def measure(options: argparse.Namespace, place: Path, device: Device, needed: dict[str, str]) -> int:
    head = provenance()
    end = time.monotonic() + options.seconds
    choose = random.Random(options.seed)
    spares: tuple[str, ...] = ("--eep-spares", str(options.spares))
    if options.redundant_experts is not None:
        spares += ("--eep-redundant-experts", str(options.redundant_experts))
    arguments = (*FOUR_RANKS, *spares, "--eep-timeout-ms", "20000", "--incremental-streaming-output")
    say("making a small random model, and starting SGLang with four ranks")
    began = time.monotonic()
    model = make_model(place / "model", size=device.model)
    notes = StepNotes(place / "notes")
    environment = {**needed, **notes.environment()}
    server = Server(model, arguments, place / "server.log", environment, place / "d", device)
    with server:
        say(f"the server is up after {time.monotonic() - began:.0f} s")
        prompts = choose_prompts(server.url, choose, options.tokens, device)
        known = Load.with_reference(server.url, prompts, tokens=options.tokens)
        load = Load(server.url, prompts, shortened(known.wanted), options.clients)
        story = Story(place / "d", load, say=lambda text: None)
        story.wait_until_all_run(RANKS)
        need_spares(story.target, options.spares)
        with load:
            time.sleep(2.0)  # until every kernel is loaded that the load needs
            held = [(0, holdings_of(server))]
            backs = kill_in_turn(story, options, choose)
            need_spares(story.target, options.spares)
            held.append((len(backs), holdings_of(server)))
            phases = go_through_phases(story, notes, options, choose, end, server, held)
        story.close()
    left = server.leftovers()
    head["setting"] = {
        **{
            name: getattr(options, name)
            for name in ("device", "spares", "redundant_experts", "clients", "tokens", "every", "seed")
        },
        **describe_server(device, arguments),
    }
    head["requests"] = describe_requests(load)
    times = load.token_times()
    told = {
        "kills": [{name: round(getattr(fault, name), 4) for name in TIMES} for fault in backs],
        "phases": [phase.told(times) for phase in phases],
        "held": [{"kills": kills, **asdict(each)} for kills, each in held],
    }
    text = page(head, told)
    say(text)
    write_results(options.out / f"takeover-{options.device}", {**head, **told}, text)
    return exit_code(load, left)


def go_through_phases(
    story: Story,
    notes: StepNotes,
    options: argparse.Namespace,
    choose: random.Random,
    end: float,
    server: Server,
    held: list[tuple[int, Holdings]],
) -> list[Phase]:
    """``held`` is told what the processes hold after each storm, with all spares ready."""
    phases: list[Phase] = []
    for number in range(options.storms + (options.spare_kills > 0)):
        if time.monotonic() + options.calm > end:
            say("the time is over: no further storm")
            break
        phases.append(calm(options.calm, story, notes))
        if number < options.storms:
            phases.append(storm(story, notes, options.storm_kills, options.every, choose, end, WITHIN))
            if not story.wait_until_all_run(RANKS, WITHIN):
                raise RuntimeError("after a storm not all ranks came back")
        else:
            phases.append(storm_of_spares(story, options.spare_kills, options.every, choose, end))
        say(f"over: {phases[-1].kind}, {len(phases[-1].moments)} kills")
        need_spares(story.target, options.spares)
        held.append((held[-1][0] + len(phases[-1].moments), holdings_of(server)))
    return phases


def shortened(answers: Sequence[Sequence[int]]) -> list[list[int]]:
    """From half of their length to all of it. Answers of one length would begin and end together, until a kill parts them:
    then each begins with a step of its own, and that would be taken for a cost of the kill."""
    return [
        list(each[: len(each) * (len(answers) + number + 1) // (2 * len(answers))])
        for number, each in enumerate(answers)
    ]


def kill_in_turn(story: Story, options: argparse.Namespace, choose: random.Random) -> list[Fault]:
    """Each rank as often as any other, each kill when all spares are ready."""
    found: list[Fault] = []
    while len(found) < options.kills:
        for rank in choose.sample(range(RANKS), RANKS)[: options.kills - len(found)]:
            need_spares(story.target, options.spares)
            time.sleep(choose.uniform(0.3, 0.9))  # or kills meet requests that begin together always at the same place
            fault = kill_now(story, rank)
            if not (story.wait_until_noticed(fault) and story.wait_until_all_run(RANKS, WITHIN)):
                raise RuntimeError(f"rank {rank} was lost and did not come back")
            found.append(fault)
            say(f"kill {len(found):3} of {options.kills}: {fault}")
    return found


if __name__ == "__main__":
    sys.exit(main())
