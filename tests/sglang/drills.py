"""A server that is drilled, and what must hold afterwards; for tests on any device."""

from __future__ import annotations

import json
import os
import random
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from eep.drill.load import Load
from eep.drill.sglang_server import Server
from eep.drill.story import Story
from eep.drill.token_certainty import clear_prompts

RANK_STARTS = "starts as incarnation"
"""What the log says of every process of a rank."""


@dataclass
class Drilled:
    """A server and fault-free answers of it."""

    server: Server
    ranks: int
    prompts: list[list[int]]
    wanted: list[list[int]]

    @classmethod
    def of(
        cls,
        server: Server,
        ranks: int = 4,
        prompts: int = 10,
        tokens: int = 24,
        seed: int = 3,
        *,
        continued: bool = False,
        shortest: int = 4,
        longest: int = 39,
    ) -> Drilled:
        """``prompts`` of them, each of ``shortest`` to ``longest`` tokens, of whose answers of so many ``tokens`` the model
        is sure (``eep.drill.token_certainty``)."""
        choose = random.Random(seed)
        lengths = (choose.randrange(shortest, longest + 1) for _ in range(4 * prompts))
        candidates = [[choose.randrange(3, 250) for _ in range(length)] for length in lengths]
        clear = clear_prompts(server.url, candidates, prompts, tokens, continued=continued)
        wanted = Load.with_reference(server.url, clear, tokens=tokens).wanted
        return cls(server, ranks, clear, [list(each) for each in wanted])

    def story(self, clients: int = 6) -> Story:
        assert self.server.directory is not None
        return Story(self.server.directory, Load(self.server.url, self.prompts, self.wanted, clients))

    def check(self, story: Story) -> None:
        """All ranks are back, no request failed, no token was wrong."""
        assert story.wait_until_all_run(self.ranks), self.server.log[-3000:]
        story.load.stop()
        story.close()
        assert story.load.answers
        assert [answer.problem for answer in story.load.failed] == []
        assert [(answer.prompt, answer.tokens) for answer in story.load.wrong] == []
        assert all(
            answer.usage == (len(self.prompts[answer.prompt]), len(answer.tokens)) for answer in story.load.answers
        ), "the counts are those of a run without faults"


def read_status(printed: str) -> dict[str, Any]:
    """What ``eep status`` printed; a story in another thread may have printed lines around it."""
    status: dict[str, Any] = json.JSONDecoder().raw_decode(printed, printed.index("{\n"))[0]
    return status


def wait_for(condition: Callable[[], object], what: str, within: float = 200.0) -> None:
    """Until ``condition()`` is true."""
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, f"this did not happen within {within:g} s: {what}"
        time.sleep(0.05)


def wait_for_answers(load: Load, count: int = 1, within: float = 200.0) -> None:
    """Until clients have that many answers to requests that they sent after this call: the server serves now."""
    now = time.monotonic()
    wait_for(
        lambda: sum(answer.started >= now for answer in load.answers) >= count,
        f"{count} more requests answered",
        within,
    )


def lives_of(story: Story, *ranks: int) -> dict[int, int]:
    """The incarnation of each of these ranks."""
    known = story.target.ranks()
    return {rank: known[rank].incarnation for rank in ranks}


def is_started_again(story: Story, rank: int, life: int) -> bool:
    """Whether a rank has a process of a later incarnation."""
    known = story.target.ranks()[rank]
    return known.incarnation > life and known.pid is not None


def check_end(server: Server) -> None:
    """A server that has ended left nothing behind, and relaunched no rank while it ended."""
    assert server.leftovers() == []
    served, told_to_end, ended = server.log.partition("SIGTERM received")
    assert told_to_end, "the log does not say when the server was told to end"
    assert RANK_STARTS in served
    assert RANK_STARTS not in ended, "no rank is relaunched at the end"


def scrape(server: Server) -> dict[str, float]:
    """Our figures, as SGLang's own endpoint shows them."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith("eep_")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def descriptors(server: Server) -> dict[int, int]:
    """How many each process of the server has open."""
    found = {}
    for pid in server.processes():
        with suppress(FileNotFoundError):  # it has ended since
            found[pid] = len(os.listdir(f"/proc/{pid}/fd"))
    return found
