"""The real SGLang server loses a rank under load and gets it back, while this program checks every token.

It makes a random model, starts four ranks on this machine's CPU, asks for fault-free answers, drives load, kills a rank with
SIGKILL, waits until it rejoins, and prints what happened with figures. It writes timeline.png and timeline.html. The exit
code is 0 only if no request failed and no token was wrong. ``make demo`` runs it.

With ``--device cuda`` the four ranks share one GPU, under an MPS daemon that this program starts and stops. ``make demo-gpu``
runs it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from eep.drill.devices import DEVICES, Device
from eep.drill.load import Load
from eep.drill.models.checkpoint import make_model
from eep.drill.models.model_sizes import SIZES
from eep.drill.sglang_server import FOUR_RANKS, Server
from eep.drill.story import Story

RANKS = 4
SPARES_WITHIN = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(DEVICES), default="cpu", help="where the ranks run (default: cpu)")
    parser.add_argument("--spares", type=int, default=0, help="how many spares to keep ready (default: 0)")
    parser.add_argument("--rank", type=int, default=1, help="which rank to kill, 0 to 3 (default: 1)")
    parser.add_argument("--clients", type=int, default=8, help="how many clients stream at once (default: 8)")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="seconds of load before and after the kill (default: 8)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(), help="folder for timeline.png and .html (default: this one)"
    )
    options = parser.parse_args()
    if not 0 <= options.rank < RANKS:
        parser.error(f"--rank must be between 0 and {RANKS - 1}, got {options.rank}")
    if options.spares < 0:
        parser.error(f"--spares cannot be negative, got {options.spares}")
    device = DEVICES[options.device]
    with tempfile.TemporaryDirectory(prefix="eep-demo-") as place, device.prepared() as environment:
        return run(options, device, environment, Path(place))


def run(options: argparse.Namespace, device: Device, environment: dict[str, str], place: Path) -> int:
    size = SIZES[device.model]
    say(f"making a random model: {size}")
    model = make_model(place / "model", size=device.model)
    say(f"starting SGLang with {RANKS} ranks on {device.name}; this takes about a minute")
    arguments = (*FOUR_RANKS, "--eep-timeout-ms", "20000", "--eep-spares", str(options.spares))
    if not device.shared:
        # Room for every expert on every rank: a last rank alone could serve. The default is room for the loss of one.
        arguments += ("--eep-redundant-experts", str((RANKS - 1) * size.experts))
    with Server(model, arguments, place / "server.log", environment, place / "d", device) as server:
        choose = random.Random(7)
        prompts = [[choose.randrange(3, 250) for _ in range(choose.randrange(4, 40))] for _ in range(16)]
        say(f"asking {len(prompts)} prompts for their fault-free answers")
        load = Load.with_reference(server.url, prompts, clients=options.clients)
        story = Story(place / "d", load)
        story.wait_until_all_run(RANKS)
        if len(story.target.wait_for_spares(options.spares, SPARES_WITHIN)) < options.spares:
            say(f"not all spares were ready within {SPARES_WITHIN:.0f} s; going on without them")
        say(f"{options.clients} clients stream; rank {options.rank} will be killed in {options.seconds:.0f} s")
        with load:
            time.sleep(options.seconds)
            fault = story.kill(options.rank)
            is_back = story.wait_until_noticed(fault) and story.wait_until_all_run(RANKS)
            time.sleep(options.seconds)
        story.close()
        options.out.mkdir(parents=True, exist_ok=True)
        pictures = story.draw(options.out / "timeline", f"rank {options.rank} of {RANKS} is killed under load")
        say("")
        for line in story.summary():
            say(line)
        say(f"the pictures: {', '.join(map(str, pictures))}")
        if not is_back:
            say(f"rank {options.rank} did not come back; the end of the server's log:\n{server.log[-3000:]}")
    left = server.leftovers()
    if left:
        say(f"the server left behind: {', '.join(left)}")
    return int(bool(load.failed or load.wrong or left or not is_back))


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
