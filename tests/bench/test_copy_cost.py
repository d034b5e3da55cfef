"""The bench of what the host copy costs: its switch, in a rank that is made up, and what it says of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.common.comparison import sum_up_phases, sum_up_turns
from bench.common.phases import Phase
from bench.common.turns import Block, Turn
from bench.context import copy_cost, copy_switch
from bench.context.copy_report import NAMES, TAIL, complaints, count_copied, page
from bench.context.copy_switch import Switch, copied_within
from eep.recovery.session import Session
from eep.requests.kv.copy_index import CopyWriter, bytes_for
from eep.requests.kv.copy_layout import PAGE
from eep.requests.kv.kv_journal import fingerprint
from sglang_patches.rank.kv.anchored_pool import AnchoredPool
from sglang_patches.rank.kv.copied_pages import layout_of
from sglang_patches.rank.kv.host_copy import HostCopy


class Rank:
    """It has one request, whose context grows."""

    def __init__(self) -> None:
        self.pool = AnchoredPool()
        self.pool.take_table((3, 64 * PAGE))
        layers = self.pool.take_cache([torch.zeros(64 * PAGE, 8, dtype=torch.uint8)] * 2)
        self.copy = HostCopy(self.pool, bytes_for(64, layout_of(layers).page_bytes))
        assert self.pool.journal is not None
        self.journal = self.pool.journal
        self.begin("first")

    def begin(self, name: str) -> None:
        self.journal.withdraw(1)
        self.journal.name(1, fingerprint(name))

    def has(self, pages: int) -> None:
        self.journal.count(np.array([1]), np.array([pages * PAGE]))


@pytest.fixture
def switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Switch:
    monkeypatch.setattr(HostCopy, "copy_some", HostCopy.copy_some)  # so that all is as it was afterwards
    monkeypatch.setattr(CopyWriter, "enter", CopyWriter.enter)
    monkeypatch.setattr(Session, "collect", Session.collect)
    made = Switch(tmp_path / "switch")
    monkeypatch.setenv("EEP_BENCH_SWITCH", made.environment()["EEP_BENCH_SWITCH"])
    copy_switch.register()
    return made


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    for name, value in (("EEP_CONTROL_DIR", str(tmp_path)), ("EEP_RANK", "0"), ("EEP_INCARNATION", "0")):
        monkeypatch.setenv(name, value)
    made = Rank()
    yield made
    made.pool.anchor.close()


def tokens(switch: Switch) -> list[int]:
    return [count for _, count in switch.copied()]


def test_while_the_copy_rests_nothing_is_copied_and_never_will_be(switch: Switch, rank: Rank) -> None:
    rank.has(2)
    rank.copy.copy_some()
    assert tokens(switch) == [2 * PAGE]
    switch.throw(False)
    rank.has(12)
    assert not rank.copy.copy_some()
    switch.throw(True)
    rank.copy.copy_some()
    assert tokens(switch) == [2 * PAGE], "what came meanwhile is not copied later"
    rank.has(13)
    rank.copy.copy_some()
    assert tokens(switch) == [2 * PAGE, PAGE]


def test_requests_that_began_and_ended_while_the_copy_rested_take_no_room(switch: Switch, rank: Rank) -> None:
    for name in ("one", "another"):
        rank.begin(name)
        rank.has(60)
        switch.throw(False)
        rank.copy.copy_some()
        switch.throw(True)
        rank.copy.copy_some()
    rank.begin("last")
    rank.has(63)
    rank.copy.copy_some()
    assert tokens(switch) == [63 * PAGE]


def test_moments_are_counted_in_the_times_they_lie_in() -> None:
    copied = [(1.0, 16), (2.0, 32), (3.0, 64), (3.5, 128)]
    assert copied_within(copied, [(0.5, 2.0), (3.0, 3.5)]) == 80


PHASES = [
    Phase(True, 98, 5.1, 10.1, contexts=1000, began=0.0, ended=10.0),
    Phase(False, 100, 5, 10, contexts=1000, began=10.0, ended=20.0),
]
TURNS = [Turn(True, 30, 31), Turn(False, 31, 32), Turn(False, 32, 33), Turn(True, 33, 34)]


def test_the_tail_of_a_pass_is_no_copy_at_rest() -> None:
    copied = [(5.0, 960), (10.0 + TAIL / 2, 16), (30.5, 32), (31.1, 16), (33.5, 32)]
    assert count_copied(copied, PHASES, TURNS) == {
        "phases": {"contexts": 1000, "at_work": 960, "at_rest": 0},
        "turns": {"at_work": 64, "at_rest": 0},
    }
    found = count_copied([(15.0, 48), (31.9, 16)], PHASES, TURNS)
    assert (found["phases"]["at_rest"], found["turns"]["at_rest"]) == (48, 16)


def head(copied: dict[str, dict[str, int]], left_over: list[str] | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {
        **{"command": "python -m bench.context.copy_cost", "commit": "abc", "date": "2026-01-01"},
        "machine": {"cpu": "a CPU", "cores": 2, "python": "3", "torch": "2"},
        "setting": {
            **{"device": "cpu", "clients": 8, "phase_seconds": 5.0, "prompt_tokens": 600, "tokens": 64, "ranks": 4},
            **{"kv_backup": "1GiB", "dtype": "float32", "sglang": "0.5", "note": "Busy.", "load_average": [1, 2]},
            "turns": {"turn": 3.0, "tokens": 400},
        },
        "copied": copied,
        "left_over": left_over or [],
    }
    return {**made, "complaints": complaints(made)}


GOOD = {"phases": {"contexts": 1000, "at_work": 960, "at_rest": 0}, "turns": {"at_work": 64, "at_rest": 0}}


@pytest.mark.parametrize(
    ("where", "changes", "said"),
    [
        ("phases", {}, []),
        ("phases", {"at_work": 0}, ["nothing was copied in phases with the copy at work"]),
        ("phases", {"at_rest": 48}, ["48 tokens were copied in phases with the copy at rest"]),
        ("turns", {"at_work": 0}, ["nothing was copied in turns with the copy at work"]),
        ("turns", {"at_rest": 16}, ["16 tokens were copied in turns with the copy at rest"]),
    ],
)
def test_a_switch_that_does_nothing_is_seen(where: str, changes: dict[str, int], said: list[str]) -> None:
    assert head({**GOOD, where: {**GOOD[where], **changes}})["complaints"] == said


def test_the_page_tells_the_ratio_and_what_was_copied() -> None:
    told = {
        "steady": sum_up_phases(PHASES, NAMES),
        "turns": sum_up_turns([Block(0.99, 0.99, 4.0, 0.0, 0.0), Block(0.98, 0.98, 4.0, 0.0, 0.0)], NAMES),
    }
    text = page(head(GOOD), told)
    assert "**passed**. Tokens per second with the copy at work are 0.980 of those with it at rest" in text
    assert "960 tokens were copied, of 1000" in text
    assert "Busy." in text
    assert "**not passed: left over: process 7**" in page(head(GOOD, ["process 7"]), told)


def parsed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["copy_cost", *arguments])
    return copy_cost.parse()


def test_each_device_has_defaults_and_the_command_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parsed(monkeypatch, "--device", "cuda", "--pairs", "3")
    assert (options.pairs, options.dtype, options.prompt_tokens) == (3, "bfloat16", 4000)
    assert parsed(monkeypatch).dtype == "float32"
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--dtype", "int8")
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--phase-seconds", "1")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_cache_and_the_copy_hold_what_all_clients_have(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = parsed(monkeypatch, "--device", device)
    arguments = copy_cost.server_arguments(options)
    room = int(arguments[arguments.index("--max-total-tokens") + 1])
    assert room >= options.clients / 4 * (options.prompt_tokens + options.turns.tokens)
    row = {"cpu": 4 * 2 * 2 * 64 * 4, "cuda": 4 * 2 * 4 * 128 * 2}[
        device
    ]  # layers, keys and values, heads, width, bytes
    size = {"512MiB": 512 << 20, "8GiB": 8 << 30}[options.kv_backup]
    assert size / 4 > room * row
