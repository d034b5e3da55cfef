"""The real server with copies of contexts in host memory. The caches of lost ranks are out of reach: their GPUs are lost."""

from __future__ import annotations

import random
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.context.clients import flush
from bench.context.restore_switch import Switch
from eep.drill.devices import CPU
from eep.drill.load import Load, ask
from eep.drill.sglang_server import FOUR_RANKS, Server
from eep.drill.story import Story
from eep.operations.host_status import read_status
from eep.requests.kv.copy_layout import PAGE

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

RANKS, TOKENS, PART, PARTS = 4, 64, 64, 5


@pytest.fixture(scope="module", params=["prefix cache", "none"])
def server(
    request: pytest.FixtureRequest, sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("host-copy")
    switch = Switch(place / "switch")
    switch.set(restored=True, caches=False)
    in_parts = ("--chunked-prefill-size", str(RANKS * PART))  # SGLang divides it among the ranks
    ours = ("--eep-timeout-ms", "10000", "--eep-faults", "on", "--eep-kv-backup", "64MiB", "--enable-metrics")
    with Server(
        *(model, (*FOUR_RANKS, *in_parts, *ours), place / "log", switch.environment()),
        directory=place / "d",
        device=CPU.caching() if request.param == "prefix cache" else CPU,
    ) as made:
        yield made
    assert made.leftovers() == []


def prompt_of(seed: int) -> list[int]:
    """One that no rank knows."""
    choose = random.Random(seed)
    return [choose.randrange(256) for _ in range(PARTS * PART + 7)]


def taken_along(server: Server) -> list[tuple[int, int]]:
    """How many tokens requests had from a host copy, and how many they needed."""
    found = re.findall(r"has (\d+) of (\d+) tokens from the host copy of rank", server.log)
    return [(int(had), int(needed)) for had, needed in found]


def figures(server: Server, name: str) -> list[float]:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)]


@pytest.mark.parametrize(
    ("point", "skip", "in_answer"), [("kv.journal", PARTS + TOKENS // 2, True), ("kv.backup.mid", PARTS // 2, False)]
)
def test_a_request_of_a_lost_gpu_takes_its_context_along(
    server: Server, point: str, skip: int, in_answer: bool
) -> None:
    """To have an answer that is long enough, end tokens are ignored. Without a prefix cache, a prompt of which parts are
    missing would be computed again then."""
    assert server.directory is not None
    story = Story(server.directory, Load(server.url, [], []))
    assert story.wait_until_all_run(RANKS)
    for seed in range(5):
        before, prompt = len(taken_along(server)), prompt_of(100 * skip + seed)
        story.target.arm(2, point, "kill", skip=skip)
        answer = ask(server.url, prompt, TOKENS, rank=2, ignore_eos=in_answer)
        assert story.target.wait_until_fired(2, point, 1.0)
        assert story.wait_until_all_run(RANKS), server.log[-3000:]
        flush(server.url)  # what was restored must not serve as its own measure
        wanted = ask(server.url, prompt, TOKENS, rank=3, ignore_eos=in_answer)
        assert (answer.problem, answer.tokens) == (wanted.problem, wanted.tokens)
        assert answer.tokens
        if len(taken_along(server)) > before:
            break
    else:
        pytest.fail("no context came from a host copy\n" + server.log[-3000:])
    story.close()
    had, needed = taken_along(server)[-1]
    assert 0 < had < needed
    assert had % PAGE == 0
    assert sum(figures(server, 'eep_kv_restored_tokens_total{source="host"}')) == sum(
        had for had, _ in taken_along(server)
    )
    assert sum(figures(server, 'eep_kv_restored_tokens_total{source="anchor"}')) == 0
    assert len(figures(server, "eep_kv_backup_covered_tokens{")) == RANKS
    told = read_status(server.directory)
    assert 0 < told["context_copies"]["bytes"] <= 64 << 20
    assert told["context_copies"]["room_tokens"] > 0
    assert len([held for held in told["anchored"] if held["name"] == "kv-copy"]) == RANKS
    assert sum(figures(server, 'eep_anchored_bytes{kind="context-copies"}')) > 0
