"""The decisions and the arithmetic of the bench of long contexts, on kills that are made up."""

from __future__ import annotations

import importlib
import math
import random
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.context import clients, copy_pass, restore_switch
from bench.context.__main__ import CHUNK, server_arguments, wait_for
from bench.context.clients import Known, LongClients, count_tokens, learn
from bench.context.pauses import NothingMoved, Pauses, measure
from bench.context.plan import PREFILL, RESTORED, Turn, count_long, make_prompts, parse_contexts, plan
from bench.context.report import complaints, page, plot, summary, why_computed
from bench.context.restore_switch import NO_CACHES_BY_SWITCH, OFF_BY_SWITCH, Switch
from eep.drill.query_answers import Answer
from eep.drill.story import Fault
from sglang_patches.rank.kv import lost_pool, restore

TURN = Turn(2048, RESTORED, 1)
KILL = Fault(1, "killed", at=10.0, noticed=0.01, running=0.2, rejoined=3.0)


def answer(rank: int, *times: float, started: float = 0.0) -> Answer:
    return Answer(0, started, [7] * len(times), list(times), rank=rank)


def test_lengths_are_sorted_and_each_is_there_once() -> None:
    assert parse_contexts("2048,128,128") == [128, 2048]


@pytest.mark.parametrize("text", ["", "128;256", "many", "0", "31,128", "-5", "1048577"])
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="tokens"):
        parse_contexts(text)


def test_lengths_and_ways_take_turns_and_every_rank_is_hit() -> None:
    turns = plan([128, 512], [RESTORED, PREFILL], 32, ranks=4, seed=3)
    assert Counter((turn.context, turn.way) for turn in turns) == dict.fromkeys(
        [(context, way) for context in (128, 512) for way in (RESTORED, PREFILL)], 8
    )
    assert Counter(turn.rank for turn in turns) == dict.fromkeys(range(4), 8)
    for one, other in zip(turns[::2], turns[1::2], strict=True):
        assert one.context == other.context
        assert {one.way, other.way} == {RESTORED, PREFILL}
    assert {turn.way for turn in turns[::2]} == {RESTORED, PREFILL}, "one way is always the first"
    for each, later in zip(turns, turns[4:], strict=False):
        assert each.rank == later.rank, "no rank is killed sooner again than it must be"
    for lap in range(0, 32, 4):
        assert {turn.context for turn in turns[lap : lap + 4]} == {128, 512}


def test_as_many_kills_as_were_asked_for() -> None:
    assert len(plan([128, 512, 2048], [RESTORED, PREFILL], 20, ranks=4, seed=1)) == 20


def test_contexts_are_restored_more_often_than_they_are_computed() -> None:
    turns = plan([128, 512], [RESTORED, PREFILL], 40, ranks=4, seed=3, restored=4)
    assert Counter((turn.context, turn.way) for turn in turns) == {
        (context, way): 16 if way == RESTORED else 4 for context in (128, 512) for way in (RESTORED, PREFILL)
    }


@pytest.mark.parametrize(("spares", "ready"), [(4, 4), (8, 5), (12, 9)])
def test_a_kill_waits_for_the_spares_of_ranks_not_killed_of_late(spares: int, ready: int) -> None:
    assert wait_for(spares) == ready


def test_no_two_prompts_have_a_prefix_in_common() -> None:
    prompts = make_prompts(random.Random(1), 32, 100, 100)
    assert {len(prompt) for prompt in prompts} == {100}
    assert len({prompt[0] for prompt in prompts}) == 32


def test_what_a_kill_cost_each_kind_of_request() -> None:
    long = [
        answer(1, 8.0, 9.9, 10.9, 11.0),  # waits 1.0 s over the kill
        answer(1, 8.1, 9.8, 10.005, 11.505, 11.6),  # one more token was on its way; then 1.5 s
        answer(0, 8.2, 9.9, 10.3, 11.2, 14.0),  # at 11.2 it has waited 0.9 s while the others prefill
    ]
    short = [
        answer(1, 9.95, 10.65, started=9.9),
        answer(1, 2.0, started=1.0),  # was over
        answer(2, 8.3, 8.8, started=8.25),
    ]
    found = measure(TURN, KILL, long, short, restored=4000, recomputed=3)
    assert found.moved == pytest.approx(1.5)
    assert found.moved_requests == 2
    assert found.moved_short == pytest.approx(0.7)
    assert found.others == pytest.approx(2.8), "this wait began before the last moved request went on, at 11.505"
    assert found.usual == pytest.approx(1.7)
    assert (found.restored_tokens, found.recomputed_tokens) == (4000, 3)


def test_waits_of_others_after_the_last_moved_request_went_on_do_not_count() -> None:
    long = [answer(1, 8.0, 9.9, 10.9), answer(0, 8.0, 9.9, 10.3, 10.95, 14.0)]
    assert measure(TURN, KILL, long, [], 0, 0).others == pytest.approx(0.65)
    assert measure(TURN, KILL, long, [], 0, 0).moved_short is None


def test_a_kill_that_hits_no_long_answer_says_so() -> None:
    over, not_begun = answer(1, 8.0, 9.9), answer(1, 10.5, started=9.9)
    with pytest.raises(ValueError, match="answers are too short"):
        measure(TURN, KILL, [over, not_begun], [], 0, 0)


def test_a_rank_that_did_not_come_back_is_no_measurement() -> None:
    with pytest.raises(ValueError, match="did not come back"):
        measure(TURN, Fault(1, "killed", at=10.0, running=0.2), [answer(1, 8.0, 11.0)], [], 0, 0)


def pauses(context: int, way: str, moved: float, restored: int = 0) -> Pauses:
    return Pauses(context, way, 1, 0.05, 3.0, 2, moved, None, 0.3, 0.1, restored, 9)


KILLS = [
    pauses(512, PREFILL, 0.9),
    pauses(512, RESTORED, 0.4, 1000),
    pauses(128, RESTORED, 0.3, 250),
    pauses(512, PREFILL, 1.9),
    pauses(512, PREFILL, 1.0),
]


def test_figures_of_each_length_and_way() -> None:
    cells = summary(KILLS)
    assert [(cell["context"], cell["way"], cell["kills"]) for cell in cells] == [
        (128, RESTORED, 1),
        (512, RESTORED, 1),
        (512, PREFILL, 3),
    ]
    assert cells[2]["moved"] == {"p50_ms": 1000.0, "p99_ms": 1900.0, "samples": 3, "largest_ms": 1900.0}
    assert cells[2]["moved_short"] is None
    assert (cells[1]["restored_tokens"], cells[2]["recomputed_tokens"]) == (1000, 27)


def results(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        **{"command": "python -m bench.context", "commit": "abc", "date": "2026-01-01", "note": ""},
        "machine": {"cpu": "a CPU", "cores": 2, "python": "3", "torch": "2"},
        "setting": {
            **{"device": "cpu", "kills": 5, "long": 8, "short": 4, "tokens": 64, "kill_after": 16, "ranks": 4},
            **{"chunk": 2048, "sglang": "0.5", "note": "Busy.", "load_average": [1, 2]},
            **{"dtype": "float32", "contexts": [128, 512], "clients_with": {128: 8, 512: 4}},
        },
        "requests": {"answered": 50, "failed": 0, "wrong": 0},
        "kills": KILLS,
        "cells": summary(KILLS),
        "left_over": [],
        "ended_by": "",
        "why_computed": {OFF_BY_SWITCH: 6},
    }
    return {**made, **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"requests": {"failed": 2, "wrong": 1}}, ["2 requests failed", "1 answers have a wrong token"]),
        ({"left_over": ["process 7"]}, ["left over: process 7"]),
        ({"ended_by": "rank 1 was lost", "kills": KILLS[:4]}, ["rank 1 was lost", "only 4 of 5 kills were done"]),
        ({"kills": KILLS[:4]}, ["only 4 of 5 kills were done"]),
        (
            {"cells": summary([pauses(512, RESTORED, 0.4), pauses(128, PREFILL, 0.4)])},
            ["no context of 512 tokens was restored"],
        ),
        ({"cells": summary([pauses(512, PREFILL, 0.4)])}, ["contexts of 128 tokens were not measured"]),
    ],
)
def test_why_a_run_has_not_passed(changes: dict[str, Any], said: list[str]) -> None:
    assert complaints(results(**changes)) == said


def test_a_run_keeps_the_kills_that_were_over_when_something_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came = iter([pauses(128, RESTORED, 0.3), NothingMoved("answers are too short"), RuntimeError("rank 1 was lost")])

    def kill_once(*arguments: Any) -> Pauses:
        found = next(came)
        if isinstance(found, Exception):
            raise found
        arguments[-1].kills.append(found)
        return found

    bench = importlib.import_module("bench.context.__main__")
    monkeypatch.setattr(bench, "kill_once", kill_once)
    monkeypatch.setattr(bench, "learn_all", lambda *_: (Known([], []), {128: Known([], [])}))
    monkeypatch.setattr(bench, "Story", lambda *_, **__: SimpleNamespace(close=lambda: None))
    options = SimpleNamespace(seed=1, ways=[RESTORED], kills=9, restored=1)
    server = SimpleNamespace(directory="d", url="")
    outcome = bench.kill_in_turns(options, server, Switch(tmp_path / "switch"), math.inf)
    assert [kill.moved for kill in outcome.kills] == [0.3]
    assert outcome.ended_by == "rank 1 was lost"


def test_in_bfloat16_answers_may_differ() -> None:
    made = results(requests={"answered": 50, "failed": 0, "wrong": 3})
    made["setting"]["dtype"] = "bfloat16"
    assert complaints(made) == []
    assert "3 with another token" in page({**made, "complaints": []})


def test_the_page_has_a_row_for_each_length_and_way(tmp_path: Path) -> None:
    text = page({**results(), "complaints": []})
    assert "| 512 | prefill | 3 | 1000 (1900) | 300 (300) | 100 (100) | 0 | 27 |" in text
    assert "Busy." in text
    assert "up to 8 clients (4 with 512 tokens)" in text
    assert f"{OFF_BY_SWITCH} (6)" in text


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(tmp_path / "plot.png", KILLS, "subject")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_why_contexts_were_computed_is_read_from_the_log() -> None:
    log = (
        "[DP1] the context of request a~1 is computed again, 2060 tokens: rank 2 has noted nothing of it\n"
        "[DP1] request c~1 has 2059 of 2060 tokens from rank 2\n"
        "[DP0] the context of request b~1 is computed again, 90 tokens: rank 0 has noted nothing of it\n"
        f"[DP0] the context of request b~2 is computed again, 90 tokens: {OFF_BY_SWITCH}\n"
    )
    assert why_computed(log) == {"a rank has noted nothing of it": 2, OFF_BY_SWITCH: 1}


def test_tokens_are_counted_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shown:
        def __enter__(self) -> Shown:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read(self) -> bytes:
            return (
                b"# HELP eep_kv_restored_tokens_total Tokens\n"
                b'eep_kv_restored_tokens_total{source="anchor"} 4000.0\neep_kv_restored_tokens_total{source="host"} 100.0\n'
                b'eep_kv_recomputed_tokens_total{rank="1"} 2.0\neep_kv_recomputed_tokens_total{rank="2"} 3.0\n'
            )

    monkeypatch.setattr(clients.urllib.request, "urlopen", lambda *_, **__: Shown())
    assert count_tokens("http://here") == (4100, 5)


KNOWN = Known([[5], [6], [7]], [[1, 2, 3, 4]] * 3)


def test_long_clients_ask_ranks_in_turn_and_check_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(url: str, prompt: list[int], tokens: int, *, number: int, rank: int, seen: Any, **_: Any) -> Answer:
        seen(tokens)
        return Answer(number, 0.0, [1, 2, 3, 4 if number else 9], rank=rank)

    monkeypatch.setattr(clients, "ask", ask)
    asking = LongClients("", KNOWN, ranks=2)
    asking.wait_for_tokens(4)
    asking.join()
    assert sorted((answer.prompt, answer.rank) for answer in asking.answers) == [(0, 0), (1, 1), (2, 0)]
    assert asking.failed == []
    assert [answer.prompt for answer in asking.wrong] == [0]


def test_the_rank_that_is_to_be_killed_has_the_first_long_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "ask", lambda *_, number, rank, **__: Answer(number, 0.0, rank=rank))
    asking = LongClients("", KNOWN, ranks=4, first=3)
    asking.join()
    assert sorted((answer.prompt, answer.rank) for answer in asking.answers) == [(0, 3), (1, 0), (2, 1)]


class Model:
    """Answers a prompt with numbers that follow its first token. It is not sure of prompts that begin with one of ``ties``.
    Those in ``unlike`` go on otherwise when they are continued."""

    def __init__(self, ties: set[int] = frozenset(), unlike: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.ties, self.unlike = ties, unlike
        self.weighed: list[tuple[int, int]] = []
        self.continued: list[tuple[int, int]] = []

    def weigh(self, url: str, prompt: list[int], tokens: int, timeout: float, rank: int) -> tuple[list[int], float]:
        self.weighed.append((prompt[0], rank))
        return [prompt[0] + each for each in range(tokens)], 1e-5 if prompt[0] in self.ties else 1.0

    def ask(self, url: str, prompt: list[int], tokens: int, *, rank: int, **_: Any) -> Answer:
        self.continued.append((prompt[0], rank))
        said = [prompt[0] + len(prompt) - 3 + each for each in range(tokens)]
        return Answer(0, 0.0, [-1] * tokens if prompt[0] in self.unlike else said)


def learned(monkeypatch: pytest.MonkeyPatch, model: Model, **how: bool) -> Known:
    monkeypatch.setattr(clients, "make_prompts", lambda *_: [[first, 1, 1] for first in range(16)])
    monkeypatch.setattr(clients, "weigh_answer", model.weigh)
    monkeypatch.setattr(clients, "ask", model.ask)
    return learn("", random.Random(1), 4, (3, 3), 16, ranks=4, **how)  # type: ignore[arg-type]


def test_prompts_of_whose_answers_the_model_is_not_sure_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(ties={1}, unlike={2})
    known = learned(monkeypatch, model, continued=True)
    assert [prompt[0] for prompt in known.prompts] == [0, 3, 4, 5]
    assert known.wanted[1] == list(range(3, 19))
    assert len(model.weighed) == 8, "each prompt is asked once, and no more of them than are needed"
    rank_of, of_continued = dict(model.weighed), dict(model.continued)
    assert all(of_continued[first] == (rank_of[first] + 1) % 4 for first in of_continued)
    assert 1 not in of_continued
    assert [first for first, _ in model.continued].count(3) == 8


def test_where_answers_need_not_be_exact_all_prompts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(ties={0, 1, 2, 3})
    assert len(learned(monkeypatch, model, continued=True, exact=False).prompts) == 4
    assert model.continued == []


def test_too_few_sure_answers_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="sure of 2 answers; 4 are needed"):
        learned(monkeypatch, Model(ties=set(range(14))), continued=False)


@pytest.mark.parametrize(("context", "clients"), [(128, 8), (8192, 8), (32768, 4), (100000, 1), (1 << 20, 1)])
def test_the_longer_the_prompts_the_fewer_clients(context: int, clients: int) -> None:
    assert count_long(context, 8) == clients


def test_a_cache_has_room_for_the_longest_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = server_arguments([8192, 100000], long=8, tokens=64, spares=0)
    room = int(arguments[arguments.index("--max-total-tokens") + 1])
    assert 2 * 100064 < room < 3 * 100064


def test_long_clients_that_fail_before_the_kill_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "ask", lambda *_, number, **__: Answer(number, 0.0, problem="HTTP 503"))
    with pytest.raises(RuntimeError, match="HTTP 503"):
        LongClients("", KNOWN, ranks=2).wait_for_tokens(1)


def test_long_clients_are_waited_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()
    monkeypatch.setattr(clients, "_WITHIN", 0.05)
    monkeypatch.setattr(clients, "ask", lambda *_, number, **__: hold.wait(60) and Answer(number, 0.0))
    asking = LongClients("", KNOWN, ranks=2)
    with pytest.raises(RuntimeError, match="got 0 tokens"):
        asking.wait_for_tokens(1)
    with pytest.raises(TimeoutError, match="3 long requests"):
        asking.join()
    hold.set()


def test_a_cache_has_room_for_what_a_rank_has_and_takes_over() -> None:
    arguments = server_arguments([128, 2048], long=8, tokens=64, spares=0)
    assert int(arguments[arguments.index("--max-total-tokens") + 1]) > 4 * (2048 + 64)
    assert int(arguments[arguments.index("--chunked-prefill-size") + 1]) == 4 * CHUNK


def test_passes_of_the_host_copy_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("EEP_CONTROL_DIR", str(tmp_path)), ("EEP_RANK", "0"), ("EEP_INCARNATION", "0")):
        monkeypatch.setenv(name, value)
    passes = copy_pass.measure(requests=3, layers=2, row_bytes=8)
    assert len(passes.first) == len(passes.later) == len(passes.idle) / 2 == copy_pass.PASSES
    assert min(*passes.first, *passes.later, *passes.idle) > 0


def test_restoring_is_switched_off_and_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "_restore", lambda *_: 42)
    monkeypatch.setattr(lost_pool, "get_lost_pool", lambda *_: 43)
    switch = Switch(tmp_path / "switch")
    monkeypatch.setenv("EEP_BENCH_SWITCH", switch.environment()["EEP_BENCH_SWITCH"])
    restore_switch.register()
    assert restore._restore(None, None, None, None, None) == 42  # type: ignore[arg-type]
    switch.set(restored=False)
    with pytest.raises(restore.NoRestore, match=OFF_BY_SWITCH):
        restore._restore(None, None, None, None, None)  # type: ignore[arg-type]
    switch.set(restored=True)
    assert restore._restore(None, None, None, None, None) == 42  # type: ignore[arg-type]
    assert lost_pool.get_lost_pool(None, 0, 0) == 43  # type: ignore[arg-type]
    switch.set(restored=True, caches=False)
    assert restore._restore(None, None, None, None, None) == 42  # type: ignore[arg-type]
    with pytest.raises(restore.NoRestore, match=NO_CACHES_BY_SWITCH):
        lost_pool.get_lost_pool(None, 0, 0)  # type: ignore[arg-type]
