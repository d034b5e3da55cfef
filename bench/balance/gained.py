"""Measures what moving experts gains where gates pick unevenly: tokens per second of a server whose experts stay where they
are, and of one that has moved them.

The real SGLang server with two ranks, one core each, and a random model whose gates like half of the experts better. Those
are on one rank at first. The same prompts are served again and again, and every token is checked. Of a server that moves
experts, what is told is what it did after its last move.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.balance.skewed_model import make_skewed_model
from bench.common.arguments import add_files, make_parser
from bench.common.drilled_server import describe_server, exit_code, origin_lines, say
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from eep.drill.devices import CPU
from eep.drill.load import Load
from eep.drill.sglang_server import Server
from eep.drill.token_certainty import clear_prompts

TWO_RANKS = (
    *("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--ep-size", "2", "--ep-backend", "eep"),
    # By default two ranks hold every expert each, and nothing needs to move.
    *("--eep-redundant-experts", "2"),
)
MOVES = ("--enable-eplb", "--eplb-rebalance-num-iterations", "50", "--eep-staged-experts", "4")
KINDS = {"stay": "experts stay", "move": "experts move"}
PROMPTS, TOKENS = 12, 4
QUIET_S, SETTLED_WITHIN_S = 15.0, 180.0
"""How long no expert moves before the moves count as over, and how long to wait for that."""


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="eep-bench-") as place:
        return measure(options, Path(place))


def parse() -> argparse.Namespace:
    parser = make_parser(
        "bench.balance.gained",
        __doc__,
        "Files: balance-gained-cpu.json and balance-gained-cpu.md.\n\n"
        "examples:\n"
        "  python -m bench.balance.gained                                       about ten minutes\n"
        "  python -m bench.balance.gained --rounds 1 --seconds 10 --no-files    does it work? three minutes",
    )
    parser.add_argument("--rounds", type=int, default=2, help="how many servers of each kind (default: 2)")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long each is measured (default: 40)")
    parser.add_argument("--clients", type=int, default=8, help="how many ask at once (default: 8)")
    parser.add_argument("--favour", type=float, default=3.0, help="how uneven the gates are; 1: even (default: 3)")
    add_files(parser)
    options = parser.parse_args()
    if options.rounds < 1 or options.clients < 1 or options.seconds <= 0 or not 1 <= options.favour <= 100:
        parser.error("--rounds and --clients must be at least 1, --seconds positive, and --favour 1 to 100")
    return options


def measure(options: argparse.Namespace, place: Path) -> int:
    head = provenance()
    model = make_skewed_model(place / "model", options.favour)
    told, failures = [], 0
    for number in range(options.rounds):
        for kind in KINDS if number % 2 == 0 else reversed(KINDS):
            row, failed = serve(options, model, place / f"{number}-{kind}", kind)
            say(f"{KINDS[kind]}: {row}")
            told.append(row)
            failures += failed
    head["setting"] = {
        **{name: getattr(options, name) for name in ("rounds", "seconds", "clients", "favour")},
        **describe_server(CPU, TWO_RANKS),
    }
    text = page(head, told)
    say(text)
    if not options.no_files:
        write_results(options.results / "balance-gained-cpu", {**head, "servers": told}, text)
    return int(bool(failures))


def serve(options: argparse.Namespace, model: Path, place: Path, kind: str) -> tuple[dict[str, Any], int]:
    """What one server did, and whether anything went wrong."""
    place.mkdir()
    flags = (*TWO_RANKS, "--eep-timeout-ms", "20000", *(MOVES if kind == "move" else ()))
    server = Server(model, flags, place / "log", directory=place / "d", device=CPU)
    with server:
        choose = random.Random(11)
        candidates = [[choose.randrange(3, 250) for _ in range(choose.randrange(128, 257))] for _ in range(4 * PROMPTS)]
        prompts = clear_prompts(server.url, candidates, PROMPTS, TOKENS)
        wanted = Load.with_reference(server.url, prompts, tokens=TOKENS).wanted
        load = Load(server.url, prompts, wanted, options.clients)
        with load:
            rest = wait_until_settled(place / "d") if kind == "move" else {"doses": 0, "balancedness": None}
            time.sleep(2.0)
            began = time.monotonic()
            time.sleep(options.seconds)
            ended = time.monotonic()
    tokens = sum(
        len(prompts[answer.prompt]) + TOKENS
        for answer in load.answers
        if answer.times and began <= answer.times[-1] < ended
    )
    row = {"kind": kind, **rest, "tokens_per_second": round(tokens / (ended - began), 1)}
    return row, exit_code(load, server.leftovers())


def wait_until_settled(directory: Path) -> dict[str, Any]:
    """Until no expert has moved for a while. How many times some have, and how even the ranks are then. RuntimeError if they
    never come to rest."""
    end = time.monotonic() + SETTLED_WITHIN_S
    doses, since = 0, time.monotonic()
    while time.monotonic() < end:
        asked = [sys.executable, "-m", "eep.cli", "status", "--json", "--dir", str(directory)]
        status = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
        balance = status.get("balance") or {}
        now = int(balance.get("doses", 0))
        if now != doses:
            doses, since = now, time.monotonic()
        if doses and time.monotonic() - since > QUIET_S:
            return {"doses": doses, "balancedness": balance["balancedness"]}
        time.sleep(1.0)
    raise RuntimeError(f"after {SETTLED_WITHIN_S:.0f} s experts have moved {doses} times and not come to rest")


def page(head: dict[str, Any], told: list[dict[str, Any]]) -> str:
    setting = head["setting"]
    rates = {kind: [row["tokens_per_second"] for row in told if row["kind"] == kind] for kind in KINDS}
    gained = statistics.mean(rates["move"]) / statistics.mean(rates["stay"])
    return "\n".join(
        [
            "# What moving experts gains, cpu",
            "",
            *origin_lines(head),
            f"Two ranks, one core each; gates whose scores spread {setting['favour']:g} times as wide for the experts of one "
            f"rank; {setting['clients']} clients, prompts of 128 to 256 tokens, answers of {TOKENS}.",
            "",
            "| | tokens per second, prompts and answers | times that experts moved | balancedness then |",
            "|---|---:|---:|---:|",
            *(
                f"| {KINDS[row['kind']]} | {row['tokens_per_second']:.0f} | {row['doses']} | {row['balancedness'] or ''} |"
                for row in told
            ),
            "",
            f"With moves a server does {gained:.2f} times as much.",
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
