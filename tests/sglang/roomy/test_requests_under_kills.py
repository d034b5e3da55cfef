"""Requests of every kind go on when their rank is killed, or the detokenizer, and their clients cannot tell.

One rank gets all kinds at once, first without a fault, and then it is killed. Two checks show that it had them: none had
ended when it was killed, and the front end says how many it moved.
"""

from __future__ import annotations

import re
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from eep.drill.faults import Target
from eep.drill.load import Load
from eep.drill.sglang_server import Server
from eep.drill.story import Story
from sglang_patches.front_end.request_sender import MAY_DIFFER
from tests.sglang import server_processes as processes
from tests.sglang.drills import wait_for
from tests.sglang.roomy.request_kinds import (
    COMPLETIONS,
    GREEDY,
    SAMPLED,
    TEXT,
    TOKENS,
    UNSEEDED,
    Asking,
    Kind,
    Reply,
    native,
    openai,
)
from tests.sglang.roomy.test_kills import RANKS

pytestmark = pytest.mark.timeout(900)

_MOVED = re.compile(r"replaying (\d+) requests")
_LOGPROB_TOLERANCE = 1e-4
_ENDS = "Scheduler hit an exception"


@dataclass
class Served:
    """``kinds``: requests whose answer must always be the one in ``wanted``."""

    server: Server
    directory: Path
    kinds: dict[str, Kind]
    wanted: dict[str, Reply]

    @property
    def target(self) -> Target:
        return Target(self.directory)

    def moved(self) -> int:
        """How many requests have been moved so far."""
        return sum(int(count) for count in _MOVED.findall(self.server.log))

    def wait_until_all_are_in(self) -> None:
        wait_for(lambda: all(rank.is_in for rank in self.target.ranks().values()), "all ranks are in")


def late_words(text: str) -> str:
    """A piece of a text that first occurs in its last third: a stop string."""
    plain = set(string.printable)
    for start in range(2 * len(text) // 3, len(text) - 4):
        piece = text[start : start + 4]
        if set(piece) <= plain and text.find(piece) == start:
            return piece
    raise AssertionError(f"the answer has no words to stop at: {text!r}")


@pytest.fixture(scope="module")
def served(roomy: Server) -> Iterator[Served]:
    stop = late_words(Asking(roomy, GREEDY["generate"], 2).result().texts[0])
    kinds = {
        **GREEDY,
        **SAMPLED,
        "stop string": native(True, stop=stop),
        "completions to a stop": openai(COMPLETIONS, stop=stop),
    }
    asked = {name: Asking(roomy, kind, 2) for name, kind in kinds.items()}
    wanted = {name: each.result() for name, each in asked.items()}
    assert {name: reply.problem for name, reply in wanted.items() if reply.problem or reply.status != 200} == {}
    assert roomy.directory is not None
    served = Served(roomy, roomy.directory, kinds, wanted)
    yield served
    served.wait_until_all_are_in()  # else a rank that the last test killed would start while the server ends


# First, that the kinds are what they are called. Otherwise the tests after these would compare nothing with nothing.


def test_every_endpoint_has_the_same_greedy_answer(served: Served) -> None:
    wanted = served.wanted
    assert wanted["generate"].tokens == wanted["generate streamed"].tokens
    assert len(wanted["generate"].tokens) == TOKENS
    assert wanted["two samples"].texts[0] == wanted["two samples"].texts[1] == wanted["generate"].texts[0]
    assert wanted["completions"].texts == wanted["completions streamed"].texts == wanted["generate"].texts
    assert wanted["chat"].texts == wanted["chat streamed"].texts
    assert len(wanted["log-probabilities"].logprobs) > TOKENS


def test_penalties_grammars_and_stops_change_the_answer(served: Served) -> None:
    wanted = served.wanted
    penalised = {name: tuple(wanted[name].tokens) for name in GREEDY if "penalty" in name}
    assert len({*penalised.values(), tuple(wanted["generate"].tokens)}) == 4
    assert re.fullmatch(r"([a-f]{3}-){2}[0-9]{2};.*", wanted["regex"].texts[0])
    assert wanted["json schema"].texts[0].startswith("{")
    assert wanted["stop string"].finished[0]["type"] == "stop"
    assert TOKENS / 2 < len(wanted["stop string"].tokens) < TOKENS


def test_samples_differ_by_their_seeds(served: Served) -> None:
    wanted = served.wanted
    assert wanted["sampled"].tokens == wanted["sampled at once"].tokens
    assert wanted["sampled completions"].texts == wanted["sampled"].texts
    assert wanted["two sampled"].texts[0] == wanted["sampled"].texts[0] != wanted["two sampled"].texts[1]
    assert re.fullmatch(r"([a-f]{3}-){2}[0-9]{2};.*", wanted["sampled by a regex"].texts[0])
    different = {tuple(wanted[name].tokens) for name in ("generate", "regex", *SAMPLED) if wanted[name].tokens}
    assert len(different) == 7, "each seed and each way to sample has its own answer, and none is the greedy one"


@pytest.mark.parametrize(("rank", "after"), [(1, 5), pytest.param(0, 62, marks=pytest.mark.long)])
def test_every_kind_goes_on_when_its_rank_is_killed(served: Served, rank: int, after: int) -> None:
    """Early, and late: ranks send what is not streamed to the front end in pieces of 50 tokens."""
    check_that_all_go_on(served, rank, after, lambda: served.target.kill(rank))


@pytest.mark.parametrize("after", [5, pytest.param(62, marks=pytest.mark.long)])
def test_every_kind_goes_on_when_the_detokenizer_is_killed(served: Served, after: int) -> None:
    """All ranks have some of them."""
    served.wait_until_all_are_in()
    server, lives = served.server, served.target.ranks()

    def kill() -> None:
        killed = processes.kill(server, processes.DETOKENIZER)
        processes.wait_for_next(server, processes.DETOKENIZER, killed)

    check_that_all_go_on(served, None, after, kill)
    assert served.target.ranks() == lives, "a rank was lost"


def check_that_all_go_on(served: Served, rank: int | None, after: int, kill: Callable[[], None]) -> None:
    """Ask in every way at once, ``kill`` when the streams have so many tokens, and compare."""
    served.wait_until_all_are_in()
    moved, ends = served.moved(), served.server.log.count(_ENDS)
    asked = {name: Asking(served.server, kind, rank) for name, kind in served.kinds.items()}
    unseeded = Asking(served.server, UNSEEDED, rank)
    slowest = [asked[name] for name in ("generate streamed", "regex", "two samples")]
    wait_for(lambda: all(each.reply.events >= after for each in slowest), "the streams have begun")
    ended = [name for name, each in asked.items() if not each.is_alive()]
    kill()
    replies = {name: each.result() for name, each in asked.items()}
    assert ended == [], "these had ended before the process was killed"
    assert served.server.log.count(_ENDS) == ends, "a survivor has ended"
    assert served.moved() - moved >= 1 + sum(kind.samples for kind in served.kinds.values())
    for name, reply in replies.items():
        check_reply(name, reply, served.wanted[name])
    reply = unseeded.result()
    assert (reply.status, reply.problem, len(reply.tokens)) == (200, "", TOKENS)
    assert reply.counts == served.wanted["generate"].counts
    assert MAY_DIFFER not in served.server.log, "it was given a seed, which went with it"


def check_reply(name: str, reply: Reply, wanted: Reply) -> None:
    """The client cannot tell that a process was killed."""
    assert (reply.status, reply.problem) == (200, ""), name
    assert reply.tokens == wanted.tokens, name
    assert reply.texts == wanted.texts, name
    assert reply.counts == wanted.counts, name
    assert reply.finished == wanted.finished, name
    assert reply.logprobs == pytest.approx(wanted.logprobs, abs=_LOGPROB_TOLERANCE), name
    assert reply.other_logprobs == wanted.other_logprobs, name


def test_an_aborted_request_of_a_lost_rank_ends_and_is_not_replayed(served: Served) -> None:
    served.wait_until_all_are_in()
    moved = served.moved()
    asked = Asking(served.server, native(True, max_new_tokens=4000), 2, rid="unwanted")
    wait_for(lambda: asked.reply.events >= 5, "the stream has begun")
    served.target.stop(2)  # so that it cannot answer any more
    assert list(served.server._post("/abort_request", {"rid": "unwanted"})) == []
    served.target.kill(2)
    reply = asked.result()
    assert reply.finished[0]["type"] == "abort"
    assert 0 < len(reply.tokens) < 4000
    assert reply.counts == (served.wanted["generate"].counts[0], len(reply.tokens))
    assert served.moved() == moved
    assert Asking(served.server, GREEDY["generate"], None).result().tokens == served.wanted["generate"].tokens


def test_a_moved_request_can_be_aborted(served: Served) -> None:
    served.wait_until_all_are_in()
    moved = served.moved()
    asked = Asking(served.server, native(True, max_new_tokens=4000), 1, rid="moved")
    wait_for(lambda: asked.reply.events >= 5, "the stream has begun")
    served.target.kill(1)
    wait_for(lambda: served.moved() > moved, "it was moved")
    seen = asked.reply.events
    wait_for(lambda: asked.reply.events > seen + 3, "it goes on")
    list(served.server._post("/abort_request", {"rid": "moved"}))
    reply = asked.result()
    assert reply.finished[0]["type"] == "abort"
    assert Asking(served.server, GREEDY["generate"], None).result().tokens == served.wanted["generate"].tokens


def eep(*arguments: str) -> str:
    command = [sys.executable, "-m", "eep.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.long
def test_a_rank_is_taken_out_and_brought_back_as_planned(served: Served) -> None:
    served.wait_until_all_are_in()
    log_before = len(served.server.log)
    wanted = served.wanted["generate"].tokens
    prompt = [ord(letter) for letter in TEXT]
    load = Load.with_reference(served.server.url, [prompt, prompt[:9]], tokens=len(wanted), clients=4)
    story = Story(served.directory, load)
    incarnation = served.target.ranks()[3].incarnation
    with load:
        asked = Asking(served.server, GREEDY["generate streamed"], 3)
        wait_for(lambda: asked.reply.events >= 10, "the stream has begun")
        eep("rank", "remove", "3", "--dir", str(served.directory))
        wait_for(lambda: served.target.ranks()[3].pid is None, "the rank has ended")
        assert not served.target.ranks()[3].is_in
        assert asked.result().tokens == wanted, "its requests go on elsewhere"
        time.sleep(3.0)  # a rank that died would be relaunched by then
        gone = served.target.ranks()[3]
        assert (gone.pid, gone.incarnation) == (None, incarnation), "it is not relaunched"
        eep("rank", "launch", "3", "--dir", str(served.directory))
        assert story.wait_until_all_run(RANKS), served.server.log[-3000:]
    story.close()
    assert load.answers
    assert [answer.problem for answer in load.failed] == []
    assert load.wrong == []
    assert Asking(served.server, GREEDY["generate"], 3).result().tokens == wanted
    check_that_it_ended_by_itself(served, served.server.log[log_before:])


def check_that_it_ended_by_itself(served: Served, log: str) -> None:
    assert "eep: rank 3 ends: " in log
    assert "Traceback" not in log
    assert "did not end" not in eep("events", "--dir", str(served.directory))
