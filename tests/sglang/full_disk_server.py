"""Run as a process in a mount namespace of its own: the real server loses a rank while its directory is full.

``python -m tests.sglang.full_disk_server MODEL PLACE LOG``. ``PLACE`` is a small file system of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from eep.drill.faults import Target
from eep.drill.sglang_server import Server
from tests.control.supervisor.full_disk import fill_blocks, fill_inodes
from tests.sglang.drills import wait_for

TWO_RANKS = (
    *("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--ep-size", "2", "--ep-backend", "eep"),
    *("--eep-redundant-experts", "16", "--eep-timeout-ms", "20000"),
)
PROMPTS = [f"Say {number}" for number in range(4)]


def main(model: Path, place: Path, log: Path) -> None:
    with Server(model, TWO_RANKS, log, directory=place / "d") as server:
        wanted = [server.generate(prompt) for prompt in PROMPTS]
        target = Target(place / "d")
        survivor = target.ranks()[0].pid
        has_space, has_inodes = fill_blocks(place), fill_inodes(place)
        target.kill(1)
        assert [server.generate(prompt) for prompt in PROMPTS] == wanted
        wait_for(lambda: "no rank is started" in server.log, "the log says that no rank is started")
        has_inodes()
        wait_for(lambda: target.ranks()[1].is_in, "the lost rank is back without a free byte")
        assert [server.generate(prompt) for prompt in PROMPTS] == wanted
        has_space()
        target.kill(0)
        wait_for(lambda: target.ranks()[0].pid not in (None, survivor) and target.ranks()[0].is_in, "rank 0 is back")
        assert [server.generate(prompt) for prompt in PROMPTS] == wanted
        print(f"pids: {survivor} survived until it was killed")
    assert server.leftovers() == []
    assert not (place / "d").exists()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
