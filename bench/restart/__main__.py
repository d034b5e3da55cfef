"""Measures how soon a server answers again that was stopped or has crashed, with an anchor for its weights and without.

The real SGLang server with four ranks and a random model of --gigabytes, which the page cache holds: no disk is read. It is
started without an anchor; then with one, which holds nothing yet; and then again after a stop and after a crash (SIGKILL of
its main process). Times are from the command until /health answers. Every start must give the same greedy answers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.arguments import add_files, make_parser
from bench.common.drilled_server import describe_server, origin_lines, say
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from bench.restart.deep_model import LAYERS, make_deep_model
from eep.anchor.anchor import list_held
from eep.drill.devices import DEVICES, Device
from eep.drill.load import ask
from eep.drill.sglang_server import FOUR_RANKS, Server

RANKS = 4
GIGABYTES = {"cpu": 0.3, "cuda": 20.0}
PROMPTS = ([7, 9, 11, 13], [5, 4, 3, 2, 1, 6], [100, 200, 50])
TAKEN = "this life takes over the weights of an earlier server"
CASES = {
    "without": "without an anchor",
    "filling": "with an anchor that holds nothing yet",
    "stopped": "with an anchor, after a stop",
    "crashed": "with an anchor, after a crash",
}


def main() -> int:
    options = parse()
    device = DEVICES[options.device]
    with tempfile.TemporaryDirectory(prefix="eep-bench-") as place, device.prepared() as needed:
        return measure(options, Path(place), device, needed)


def parse() -> argparse.Namespace:
    parser = make_parser(
        "bench.restart",
        __doc__,
        "Files: restart-DEVICE.json and restart-DEVICE.md.\n\n"
        "examples:\n"
        "  python -m bench.restart --device cuda          20 GB on a GPU that four ranks share\n"
        "  python -m bench.restart --times 1 --no-files   does it work? about four minutes",
    )
    parser.add_argument("--device", choices=sorted(DEVICES), default="cpu", help="where the ranks run (default: cpu)")
    parser.add_argument("--gigabytes", type=float, help="weights of the model (default: 0.3, on a GPU 20)")
    parser.add_argument("--times", type=int, default=2, help="how often each is tried but filling (default: 2)")
    parser.add_argument("--crashes-only", action="store_true", help="leave out starts after a stop")
    add_files(parser)
    options = parser.parse_args()
    if options.gigabytes is None:
        options.gigabytes = GIGABYTES[options.device]
    if options.times < 1 or not 0 < options.gigabytes < 1000:
        parser.error("--times must be at least 1, and --gigabytes positive and less than 1000")
    return options


@dataclass
class Starts:
    """Starts servers of one model, and writes down how long each took."""

    model: Path
    device: Device
    needed: Mapping[str, str]
    place: Path

    def __post_init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.left: list[str] = []
        self._wanted: list[list[int]] | None = None

    def start(self, case: str, *flags: str, crash: bool = False) -> None:
        """RuntimeError if its answers are others, or if it did not take over what it was to take over."""
        number = len(self.told)
        server = Server(
            self.model,
            (*FOUR_RANKS, "--dtype", "bfloat16", "--eep-timeout-ms", "20000", *flags),
            self.place / f"log-{number}",
            self.needed,
            self.place / f"d{number}",
            self.device,
        )
        began = time.monotonic()
        with server:
            seconds = time.monotonic() - began
            answers = [ask(server.url, prompt, 16) for prompt in PROMPTS]
            if problems := [each.problem for each in answers if each.problem]:
                raise RuntimeError(f"a server {CASES[case]} did not answer: {problems}")
            found, self._wanted = [each.tokens for each in answers], self._wanted or [each.tokens for each in answers]
            if found != self._wanted:
                raise RuntimeError(f"a server {CASES[case]} gave other answers than the first one")
            taken = server.log.count(TAKEN)
            if taken != (RANKS if case in ("stopped", "crashed") else 0):
                raise RuntimeError(f"{taken} ranks of a server {CASES[case]} took over weights\n{server.log[-3000:]}")
            if crash:
                os.kill(server.pid, signal.SIGKILL)
        self.left += server.leftovers()
        self.told.append({"case": case, "seconds": round(seconds, 2)})
        say(f"{CASES[case]}: up after {seconds:.1f} s")


def measure(options: argparse.Namespace, place: Path, device: Device, needed: Mapping[str, str]) -> int:
    head = provenance()
    say(f"making a random model of {options.gigabytes:g} GB")
    model = make_deep_model(place / "model", LAYERS[options.device], options.gigabytes)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    starts = Starts(model, device, needed, place)
    for _ in range(options.times):
        starts.start("without")
    with anchor(place / "anchor") as directory:
        held_by = ("--eep-anchor", str(directory))
        starts.start("filling", *held_by, crash=options.crashes_only)
        for _ in range(options.times):
            if not options.crashes_only:
                starts.start("stopped", *held_by, crash=True)
            starts.start("crashed", *held_by, crash=options.crashes_only)
        held = sum(each.size for each in list_held(directory))
    head["setting"] = {
        "device": options.device,
        "times": options.times,
        "model_gigabytes": round(size / 1e9, 2),
        "held_gigabytes": round(held / 1e9, 2),
        **describe_server(device, (*FOUR_RANKS, "--dtype", "bfloat16")),
    }
    told = {"starts": starts.told}
    text = page(head, told)
    say(text)
    if not options.no_files:
        write_results(options.results / f"restart-{options.device}", {**head, **told}, text)
    for each in starts.left:
        say(f"left over: {each}")
    return int(bool(starts.left))


@contextlib.contextmanager
def anchor(directory: Path) -> Iterator[Path]:
    """An anchor of its own process, which ends with all that it holds."""
    command = [sys.executable, "-m", "eep.cli", "anchor", "serve", "--dir", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        try:
            yield directory
        finally:
            daemon.terminate()


def page(head: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    setting = head["setting"]
    lines = [
        f"# How soon a server is up again, {setting['device']}",
        "",
        *origin_lines(dict(head)),
        f"Four ranks; weights of {setting['model_gigabytes']} GB in files, {setting['held_gigabytes']} GB in the anchor. "
        "Every start gave the same answers.",
        "",
        "| seconds until the server answers | times | median | least | most |",
        "|---|---:|---:|---:|---:|",
    ]
    for case, text in CASES.items():
        seconds = [each["seconds"] for each in told["starts"] if each["case"] == case]
        if not seconds:
            continue
        cells = (statistics.median(seconds), min(seconds), max(seconds))
        lines.append(f"| {text} | {len(seconds)} | {' | '.join(f'{each:.1f}' for each in cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
