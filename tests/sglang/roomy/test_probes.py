"""What probes hear while a rank of the real server is killed and comes back: the server is healthy and ready all the time."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request

import pytest

from eep.drill.sglang_server import Server
from sglang_patches.front_end.service_state import LONGEST_PAUSE_S
from tests.sglang.drills import Drilled, scrape, wait_for, wait_for_answers

pytestmark = pytest.mark.timeout(600)
RANKS, PROBES = 4, ("/health", "/health_generate", "/eep/ready")


class Prober(threading.Thread):
    """Asks a probe again and again, until it is told to end."""

    def __init__(self, server: Server, path: str) -> None:
        super().__init__(daemon=True)
        self._url, self._end = server.url + path, threading.Event()
        self.answers = 0
        self.refusals: list[str] = []
        self.start()

    def run(self) -> None:
        while not self._end.wait(0.02):
            try:
                with urllib.request.urlopen(self._url, timeout=100) as answer:
                    answer.read()
            except urllib.error.HTTPError as error:
                self.refusals.append(f"{self._url} {error.code}: {error.read()[:500].decode()}")
            except OSError as error:
                self.refusals.append(f"{self._url}: {error}")
            self.answers += 1

    def has_more_than(self, answers: int) -> bool:
        return self.answers > answers

    def stop(self) -> None:
        self._end.set()
        self.join(100)


def test_no_probe_fails_while_a_rank_dies_and_comes_back(drilled: Drilled) -> None:
    before, story = scrape(drilled.server)["eep_pause_seconds_sum"], drilled.story()
    with story.load:
        wait_for_answers(story.load)
        probers = [Prober(drilled.server, path) for path in PROBES]
        for each in probers:
            wait_for(lambda each=each: each.has_more_than(1), "a probe is answered")
        assert story.wait_until_noticed(story.kill(2))
        assert story.wait_until_all_run(RANKS), drilled.server.log[-3000:]
        counts = [each.answers for each in probers]
        for each, count in zip(probers, counts, strict=True):
            wait_for(
                lambda each=each, count=count: each.has_more_than(count + 1), "a probe that began later is answered"
            )
            each.stop()
    drilled.check(story)
    refusals = [told for each in probers for told in each.refusals]
    if scrape(drilled.server)["eep_pause_seconds_sum"] - before > LONGEST_PAUSE_S:  # a machine that is as busy as that
        refusals = [told for told in refusals if "no step has been committed" not in told]
    assert refusals == []
