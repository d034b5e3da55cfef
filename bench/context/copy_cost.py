"""What does the copy of contexts in host memory (--eep-kv-backup) cost the clients of a server that loses no rank?

Starts the real SGLang server with four ranks, and compares its throughput with the copy at work and at rest, in turns in one
run (see bench/context/copy_switch.py): in phases of seconds, in which clients ask long prompts and stream the answers, and
the ranks alone in quick turns, while all clients stream one long answer.

Writes context-copy-cost-DEVICE.json and .md. The exit code is 0 only if tokens were copied with the copy at work, none with
it at rest, no request failed, no token was wrong (in float32, where that can be told) and nothing was left over.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.common.arguments import add_files, make_parser
from bench.common.comparison import sum_up_phases, sum_up_turns
from bench.common.drilled_server import describe_server, say
from bench.common.phases import Phase, compare
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from bench.common.steady_clients import Clients
from bench.common.turns import Lengths, Taken, take_turns
from bench.context.clients import learn
from bench.context.copy_report import NAMES, complaints, count_copied, page
from bench.context.copy_switch import Switch
from bench.context.plan import make_prompts
from eep.drill.devices import DEVICES, Device
from eep.drill.models.checkpoint import make_model
from eep.drill.sglang_server import FOUR_RANKS, Server

RANKS = 4
CHUNK = 2048
"""Tokens that a rank prefills in a step: what SGLang's default of 8192 comes to with four ranks."""
_PROMPTS = 12
_SPARE_TOKENS = 4096


@dataclass(frozen=True)
class Defaults:
    """What holds if the command line does not say it: a GPU serves in seconds what takes two cores minutes."""

    clients: int
    pairs: int
    phase_seconds: float
    rounds: int
    prompt_tokens: int
    tokens: int
    kv_backup: str
    dtype: str
    turns: Lengths


OF_DEVICE = {
    "cpu": Defaults(8, 10, 10.0, 3, 600, 64, "512MiB", "float32", Lengths(3.0, 400)),
    # In float32 the attention of a prefill is many times slower than that which anyone would serve with.
    "cuda": Defaults(32, 6, 2.5, 2, 4000, 128, "8GiB", "bfloat16", Lengths(0.25, 2500)),
}


def main() -> int:
    options = parse()
    gc.disable()  # or the clients stand still at times, while it looks through the answers that there are
    device = DEVICES[options.device]
    device = replace(device, flags=(*device.flags, "--dtype", options.dtype))
    with tempfile.TemporaryDirectory(prefix="eep-bench-") as place, device.prepared() as needed:
        head, told = run(options, Path(place), device, needed)
    text = page(head, told)
    say(text)
    if not options.no_files:
        write_results(options.results / f"context-copy-cost-{options.device}", {**head, **told}, text)
    return int(bool(head["complaints"]))


def parse() -> argparse.Namespace:
    parser = make_parser(
        "bench.context.copy_cost",
        __doc__,
        "examples:\n"
        "  python -m bench.context.copy_cost                     about seven minutes on two cores\n"
        "  python -m bench.context.copy_cost --device cuda       about two minutes\n"
        "  python -m bench.context.copy_cost --pairs 2 --phase-seconds 5 --rounds 1 --no-files    does it work?",
    )

    def add(name: str, kind: type, what: str) -> None:
        told = ", ".join(f"{getattr(each, name.replace('-', '_'))} on {device}" for device, each in OF_DEVICE.items())
        parser.add_argument(f"--{name}", type=kind, help=f"{what} (default: {told})")

    parser.add_argument("--device", choices=sorted(DEVICES), default="cpu", help="where the ranks run (default: cpu)")
    add("clients", int, "how many stream at once")
    add("pairs", int, "of phases with the copy at work and at rest")
    add("phase-seconds", float, "how long such a phase is")
    add("rounds", int, "of long answers in which the ranks take quick turns")
    add("prompt-tokens", int, "the longest prompt; the shortest has a sixth of it")
    add("tokens", int, "the longest answer in phases; the shortest has half of it")
    add("kv-backup", str, "host memory of all ranks for the copy")
    add("dtype", str, "float32, in which tokens are checked, or bfloat16")
    parser.add_argument("--seed", type=int, default=1, help="decides prompts and the order of turns (default: 1)")
    parser.add_argument("--note", default="", help="a sentence about the machine, for the page (default: none)")
    add_files(parser)
    options = parser.parse_args()
    for name, value in vars(OF_DEVICE[options.device]).items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    least = {"clients": RANKS, "pairs": 1, "phase_seconds": 2, "rounds": 1, "prompt_tokens": 96, "tokens": 16}
    for name, value in least.items():
        if getattr(options, name) < value:
            parser.error(f"--{name.replace('_', '-')} must be at least {value}, got {getattr(options, name)}")
    if options.dtype not in ("float32", "bfloat16"):
        parser.error(f"--dtype {options.dtype!r}: choose float32 or bfloat16")
    return options


def run(
    options: argparse.Namespace, place: Path, device: Device, needed: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    load_before = round(os.getloadavg()[0], 2)
    head: dict[str, Any] = provenance()  # before anything runs: the commit is the one that is measured
    switch = Switch(place / "switch")
    arguments = server_arguments(options)
    say("making a small random model, and starting SGLang with four ranks; this takes about a minute")
    server = Server(
        make_model(place / "model", size=device.model, context=longest(options) + 16),
        arguments,
        place / "server.log",
        {**needed, **switch.environment()},
        place / "d",
        device,
    )
    with server:
        phases, taken = measure(options, server, switch)
        copied = switch.copied()
    head["setting"] = {
        **{name: value for name, value in vars(options).items() if name not in ("results", "no_files", "turns")},
        **describe_server(device, arguments),
        "turns": asdict(options.turns),
        "ranks": RANKS,
        "load_average": [load_before, round(os.getloadavg()[0], 2)],
    }
    head["copied"] = count_copied(copied, phases, taken.turns)
    head["left_over"] = server.leftovers()
    head["complaints"] = complaints(head)
    return head, {"steady": sum_up_phases(phases, NAMES), "turns": sum_up_turns(taken.blocks, NAMES)}


def longest(options: argparse.Namespace) -> int:
    """Tokens of a prompt and its answer."""
    return int(options.prompt_tokens + max(options.tokens, options.turns.tokens))


def server_arguments(options: argparse.Namespace) -> tuple[str, ...]:
    room = -(-options.clients // RANKS) * longest(options) + _SPARE_TOKENS
    return (
        *FOUR_RANKS,
        *("--eep-timeout-ms", "20000", "--eep-kv-backup", options.kv_backup, "--incremental-streaming-output"),
        *("--max-total-tokens", str(room)),
        *("--chunked-prefill-size", str(CHUNK * RANKS), "--max-prefill-tokens", str(CHUNK * RANKS)),
    )


def measure(options: argparse.Namespace, server: Server, switch: Switch) -> tuple[list[Phase], Taken]:
    choose, lengths = random.Random(options.seed), (options.prompt_tokens // 6, options.prompt_tokens)
    if options.dtype == "float32":
        say(f"asking {_PROMPTS} prompts for their fault-free answers")
        known = learn(server.url, choose, _PROMPTS, lengths, options.tokens, ranks=RANKS, continued=False)
        prompts, wanted = known.prompts, known.wanted
    else:  # an answer depends on what else is in its batch
        prompts, wanted = make_prompts(choose, _PROMPTS, *lengths), [[]] * _PROMPTS
    clients = Clients(server.url, prompts, wanted, RANKS, options.clients, options.tokens)
    say(f"{options.clients} clients, with the copy at work and at rest in turns")
    processes = server.processes()
    phases = compare(clients, switch.throw, NAMES, processes, options.pairs, options.phase_seconds, say)
    taken = take_turns(clients, switch.throw, switch.steps, NAMES, options.rounds, options.turns, options.seed, say)
    return phases, taken


if __name__ == "__main__":
    sys.exit(main())
