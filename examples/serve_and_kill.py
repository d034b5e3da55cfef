"""The real SGLang server loses a rank under load and gets it back, while every token is checked.

Makes a small random model, starts four ranks on this machine's CPU, asks for fault-free answers, drives load, kills a rank
with SIGKILL, lets it rejoin, and tells the story with figures. Writes timeline.png and timeline.html. The exit code is 0 only
if no request failed and no token was wrong. Run by ``make demo``.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from eep.drill.load import Load
from eep.drill.server import FOUR_RANKS, Server
from eep.drill.story import Story
from eep.tiny_model import make_model

RANKS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=1, help="which rank to kill, 0 to 3 (default: 1)")
    parser.add_argument("--clients", type=int, default=8, help="how many clients stream at once (default: 8)")
    parser.add_argument("--seconds", type=float, default=8.0, help="load before and after the kill (default: 8)")
    parser.add_argument("--out", type=Path, default=Path(), help="where timeline.png and .html go (default: here)")
    options = parser.parse_args()
    if not 0 <= options.rank < RANKS:
        parser.error(f"--rank must be between 0 and {RANKS - 1}, got {options.rank}")
    with tempfile.TemporaryDirectory(prefix="eep-demo-") as place:
        return run(options, Path(place))


def run(options: argparse.Namespace, place: Path) -> int:
    say("making a small random model: 16 experts, top-4, 4 layers")
    model = make_model(place / "model")
    say(f"starting SGLang with {RANKS} ranks on the CPU; this takes about a minute")
    # Room for every expert on every rank: a last rank alone could serve.
    arguments = (*FOUR_RANKS, "--eep-redundant-experts", "48", "--eep-timeout-ms", "20000")
    with Server(model, arguments, place / "server.log", directory=place / "d") as server:
        choose = random.Random(7)
        prompts = [[choose.randrange(3, 250) for _ in range(choose.randrange(4, 40))] for _ in range(16)]
        say(f"asking {len(prompts)} prompts for their fault-free answers")
        load = Load.with_reference(server.url, prompts, clients=options.clients)
        story = Story(place / "d", load)
        story.wait_until_all_run(RANKS)
        say(f"{options.clients} clients stream; rank {options.rank} is killed in {options.seconds:.0f} s")
        with load:
            time.sleep(options.seconds)
            fault = story.kill(options.rank)
            is_back = story.wait_until_noticed(fault) and story.wait_until_all_run(RANKS)
            time.sleep(options.seconds)
        story.close()
        pictures = story.draw(options.out / "timeline", f"rank {options.rank} of {RANKS} is killed under load")
        say("")
        for line in story.summary():
            say(line)
        say(f"the pictures: {', '.join(map(str, pictures))}")
        if not is_back:
            say(f"rank {options.rank} did not come back; the end of the server's log:\n{server.log[-3000:]}")
    left = server.leftovers()
    if left:
        say(f"left over: {', '.join(left)}")
    return int(bool(load.failed or load.wrong or left or not is_back))


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
