"""What the loss of a rank costs the clients of the real SGLang server, and what it costs to be ready for it.

Starts the server with four ranks, drives a mixed load whose every token is checked, and kills one
rank after the other with SIGKILL, each when the last one is back. Of every kill: the time until the view without the rank
is committed, until all survivors run again, until the next token reaches a client, until the rank is back; the largest
gap between tokens that a client saw; tokens per second before, from kill to rejoin, and after. Before the kills,
throughput in turns with elasticity and with a membership that is taken for fixed (see
bench/failover/fixed_membership.py): in phases of seconds, and the ranks alone in quick turns.

Writes failover-DEVICE.json, .md and .png into --out (failover-DEVICE-spares with --spares, -alike with --alike), and
a -timeline.png, one of the kills; if it is interrupted during the kills, of those that are over. The exit code is 0 only if
all kills were done, no request failed, no token was wrong and nothing was left over.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.common.phases import compare
from bench.common.provenance import provenance
from bench.common.steady_clients import Clients
from bench.common.turns import OF_DEVICE, take_turns
from bench.failover.fixed_membership import Switch
from bench.failover.kills import brought_in, costs, kill_all, need_spares, victims, wrong_answers
from bench.failover.report import NAMES, draw_one, page, plot, summary
from eep.drill.devices import DEVICES, Device
from eep.drill.faults import Target
from eep.drill.load import Load, ask
from eep.drill.mixed_load import MixedLoad
from eep.drill.models.checkpoint import make_model
from eep.drill.references import learn
from eep.drill.request_mix import REQUEST_MIXES, make_queries
from eep.drill.sglang_server import FOUR_RANKS, Server
from eep.drill.story import Story
from eep.drill.token_certainty import clear_prompts

RESULTS = Path(__file__).resolve().parents[1] / "results"
PROMPTS, TOKENS = 8, 48
RANKS = 4
CLIENTS = {"cpu": 8, "cuda": 64}
WARM_LENGTHS = (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 96)
# Patience with ranks that share their cores: only deaths are measured here. Of an answer only what is new is sent: all of it
# with every token would keep the front end busy.
ARGUMENTS = (*FOUR_RANKS, "--eep-timeout-ms", "20000", "--incremental-streaming-output")


def main() -> int:
    options = parse()
    gc.disable()  # or the clients stand still at times, while it looks through the answers that there are
    with tempfile.TemporaryDirectory(prefix="eep-bench-") as place:
        return run(options, Path(place))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(DEVICES), default="cpu", help="where the ranks run (default: cpu)")
    parser.add_argument("--kills", type=int, default=20, help="how many (default: 20)")
    parser.add_argument("--spares", type=int, default=0, help="ranks in waiting to keep (default: 0)")
    parser.add_argument(
        "--redundant-experts",
        type=int,
        default=8,
        help="slots beyond the 16 experts of the model: with 8 a loss leaves experts without a copy, and the survivors bring "
        "them in; with 16 each is on two of four ranks; with 48 all are on every rank (default: 8)",
    )
    parser.add_argument("--seed", type=int, default=1, help="decides the order of ranks and of turns (default: 1)")
    parser.add_argument("--clients", type=int, help="how many stream at once (default: 8 on a CPU, 64 on a GPU)")
    parser.add_argument(
        "--pairs", type=int, default=12, help="pairs of phases with and without elasticity (default: 12)"
    )
    parser.add_argument(
        "--steady-tokens",
        type=int,
        default=TOKENS,
        help="the longest answer in those phases: the longer they are, the less do the beginnings of requests make phases "
        f"differ (default: {TOKENS})",
    )
    parser.add_argument("--phase-seconds", type=float, default=5.0, help="how long such a phase is (default: 5)")
    parser.add_argument(
        "--rounds", type=int, default=6, help="of long answers in which the ranks take quick turns (default: 6)"
    )
    parser.add_argument(
        "--alike",
        action="store_true",
        help="always elastic: what the comparison tells when there is nothing to tell (results are named -alike)",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go (default: bench/results)")
    options = parser.parse_args()
    if options.clients is None:
        options.clients = CLIENTS[options.device]
    least_of = {
        "kills": 1,
        "spares": 0,
        "redundant_experts": 0,
        "clients": 1,
        "pairs": 1,
        "phase_seconds": 2,
        "steady_tokens": 2,
        "rounds": 1,
    }
    for name, least in least_of.items():
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    return options


def run(options: argparse.Namespace, place: Path) -> int:
    device = DEVICES[options.device]
    with device.prepared() as needed:
        return measure(options, place, device, needed)


def measure(options: argparse.Namespace, place: Path, device: Device, needed: dict[str, str]) -> int:
    load_before = round(os.getloadavg()[0], 2)
    head = provenance()  # before anything runs: the commit is the one that is measured
    say("making a small random model, and starting SGLang with four ranks; this takes about a minute")
    switch = Switch(place / "switch", stuck=options.alike)
    slots = ("--eep-redundant-experts", str(options.redundant_experts))
    arguments = (*ARGUMENTS, *slots, "--eep-spares", str(options.spares))
    server = Server(
        make_model(place / "model", size=device.model),
        arguments,
        place / "server.log",
        {**needed, **switch.environment()},
        place / "d",
        device,
    )
    with server:
        choose = random.Random(options.seed)
        candidates = [[choose.randrange(3, 250) for _ in range(choose.randrange(4, 40))] for _ in range(4 * PROMPTS)]
        warm_up(server.url)
        say(f"asking {PROMPTS} prompts for their fault-free answers")
        prompts = clear_prompts(server.url, candidates, PROMPTS, TOKENS, continued=options.device == "cuda")
        short = Load.with_reference(server.url, prompts, tokens=TOKENS)
        clients = Clients(server.url, prompts, short.wanted, RANKS, options.clients, options.steady_tokens)
        say("asking requests of every kind and length for their fault-free answers")
        known = learn(server.url, make_queries(REQUEST_MIXES[device.name], options.seed), options.clients, say=say)
        if known.unsteady:
            raise RuntimeError(f"answers differ without any fault: {known.unsteady}")
        load = MixedLoad(server.url, known.usable, options.clients, options.seed, ranks=RANKS)
        need_spares(Target(place / "d"), options.spares)  # or they start beside the first phases
        say(f"{options.clients} clients, with and without elasticity in turns")
        phases = compare(
            clients,
            lambda elastic: switch.throw(elastic=elastic),
            NAMES,
            server.processes(),
            options.pairs,
            options.phase_seconds,
            say,
        )
        turns = take_turns(
            clients,
            # The front end knows every request from its beginning, so it stays elastic.
            lambda elastic: switch.throw(elastic=elastic, front_end=False),
            switch.steps,
            NAMES,
            options.rounds,
            OF_DEVICE[options.device],
            options.seed,
            say,
        ).blocks
        story = Story(place / "d", load, say=lambda text: None)
        story.wait_until_all_run(RANKS)
        say(f"{options.clients} clients stream while ranks are killed")
        with load:
            order = victims(RANKS, options.kills, options.seed)
            faults = kill_all(story, RANKS, order, options.spares, say)
        story.close()
    left = server.leftovers()
    kills = costs(story, faults)
    head["setting"] = {
        "device": options.device,
        "sglang": importlib.metadata.version("sglang"),
        "server": [*device.flags, *arguments],
        "ranks": RANKS,
        "clients": options.clients,
        "tokens": TOKENS,
        "steady_tokens": options.steady_tokens,
        "turns": asdict(OF_DEVICE[options.device]),
        "kills": len(faults),
        "alike": options.alike,
        "spares": options.spares,
        "redundant_experts": options.redundant_experts,
        "seed": options.seed,
        "load_average": [load_before, round(os.getloadavg()[0], 2)],
    }
    head["requests"] = {"answered": len(load.answers), "failed": len(load.failed), "wrong": len(load.wrong)}
    head["requests"]["by_kind"] = load.by_kind()
    head["brought_in"] = brought_in(server.log)
    head["wrong"] = [asdict(each) for each in wrong_answers(story, faults)]
    told = summary(kills, phases, turns)
    write(options, {**head, **told, "kills": [asdict(kill) for kill in kills]}, page(head, told))
    draw(options, story, kills, phases)
    problems = [*(answer.problem for answer in load.failed), *map(str, head["wrong"])]
    for problem in [*problems, *(f"left over: {each}" for each in left)]:
        say(problem)
    return int(bool(load.failed or load.wrong or left or len(faults) < options.kills))


def warm_up(url: str) -> None:
    """As a server is that has served for a while: kernels for prompts of any length are compiled and loaded. The request of a
    lost rank goes on as a prompt with what was delivered, so its length may be one that none had before."""
    prompts = [[7] * length for length in WARM_LENGTHS]
    for at_once in (1, 8):
        with ThreadPoolExecutor(at_once) as clients:
            for answer in clients.map(lambda prompt: ask(url, prompt, 2), prompts):
                if answer.problem:
                    raise RuntimeError(f"the server does not answer: {answer.problem}")


def write(options: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    name = options.out / name_of(options)
    name.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    name.with_suffix(".md").write_text(text)
    say(text)


def draw(options: argparse.Namespace, story: Story, kills: list[Any], phases: list[Any]) -> None:
    name = options.out / name_of(options)
    subject = f"Failover of the SGLang server, {RANKS} ranks on {options.device}, {options.clients} clients"
    plot(name.with_suffix(".png"), story, kills, phases, subject)
    draw_one(options.out / f"{name.name}-timeline.png", story, kills)
    say(f"written to {name}.json, .md, .png and -timeline.png")


def name_of(options: argparse.Namespace) -> str:
    said = ("-spares" if options.spares else "", "-alike" if options.alike else "")
    return f"failover-{options.device}" + "".join(said)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}" if text else "", flush=True)


if __name__ == "__main__":
    sys.exit(main())
