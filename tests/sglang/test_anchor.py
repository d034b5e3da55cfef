"""A server that is started again finds its weights in place, however it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eep.anchor.anchor import list_held
from eep.drill.load import ask
from eep.drill.sglang_server import FOUR_RANKS, Server
from tests.sglang.drills import Drilled, lives_of, wait_for, wait_for_answers

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
PROMPTS = [[7, 9, 11, 13], [5, 4, 3, 2, 1, 6], [100, 200, 50]]
TAKEN = "this life takes over the weights of an earlier server"


@contextmanager
def anchor(directory: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "eep.cli", "anchor", "serve", "--dir", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        try:
            yield daemon
        finally:
            daemon.terminate()


def answers(server: Server) -> list[list[int]]:
    found = [ask(server.url, prompt, 16) for prompt in PROMPTS]
    assert [each.problem for each in found if each.problem] == []
    return [each.tokens for each in found]


def test_servers_one_after_the_other(sglang: None, model: Path, tmp_path: Path) -> None:
    """The first is stopped, the second crashes, the third has another number of slots and loads."""
    place = tmp_path / "anchor"
    flags = (*FOUR_RANKS, "--eep-anchor", str(place), "--eep-timeout-ms", "10000")
    with anchor(place):
        with Server(model, flags, tmp_path / "log1", directory=tmp_path / "d1") as first:
            wanted = answers(first)
        assert TAKEN not in first.log
        sizes = {(each.rank, each.name): each.size for each in list_held(place)}
        with Server(model, flags, tmp_path / "log2", directory=tmp_path / "d2") as second:
            assert second.log.count(TAKEN) == 4
            assert answers(second) == wanted
            os.kill(second.pid, signal.SIGKILL)
        assert {(each.rank, each.name): each.size for each in list_held(place)} == sizes
        others = (*flags, "--eep-redundant-experts", "16")
        with Server(model, others, tmp_path / "log3", directory=tmp_path / "d3") as third:
            assert third.log.count("they are of another model, or of another version of it") == 4
            assert answers(third) == wanted
        held = list_held(place)
        assert len([each for each in held if each.name.startswith("dense-")]) == 1
        assert len(held) == 1 + 3 * 4


def test_a_server_goes_on_when_its_anchor_is_killed(sglang: None, model: Path, tmp_path: Path) -> None:
    """A rank that is lost then loads again, and says so. Ranks that live have the next anchor hold what they use."""
    place = tmp_path / "anchor"
    flags = (*FOUR_RANKS, "--eep-anchor", str(place), "--eep-timeout-ms", "10000")
    with anchor(place) as first:
        server = Server(model, flags, tmp_path / "log", directory=tmp_path / "d")
        with server:
            sizes = {(each.rank, each.name): each.size for each in list_held(place)}
            drilled = Drilled.of(server)
            story = drilled.story()
            with story.load:
                wait_for_answers(story.load)
                first.kill()
                first.wait()
                wait_for_answers(story.load)
                lives, before = lives_of(story, 1), len(server.log)
                story.kill(1)
                assert story.wait_until_back(4, lives), server.log[-3000:]
                wait_for_answers(story.load)
            drilled.check(story)
            said = server.log[before:]
            assert "takes over the weights" not in said
            assert "ends with this process: no process holds memory in" in said
            with anchor(place):
                wait_for(
                    lambda: {(each.rank, each.name): each.size for each in list_held(place)} == sizes,
                    "the ranks have the next anchor hold what they use",
                )
        assert server.leftovers() == []
