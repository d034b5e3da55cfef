"""The plugin's front end and recipes, with messages that look like SGLang's. Needs no SGLang."""

from __future__ import annotations

import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eep.requests.request_records import ReplayManner
from sglang_patches import options, recipe
from sglang_patches.front_end import ledger_adapter, tokenizer_hooks
from sglang_patches.replayed_fields import DELIVERED, LOST_LIFE
from sglang_patches.sampling.seeds import Seeds
from tests.sglang_patches.front_end.front_end_server import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    Parameters,
    Server,
    TokenizedGenerateReqInput,
)


def test_requests_wait_for_the_first_view_and_spread_over_the_ranks() -> None:
    server = Server()
    server.front_end.send(BatchTokenizedGenerateReqInput([TokenizedGenerateReqInput(rid) for rid in "abc"]))
    assert server.sent == []
    server.view(1, r0=0, r1=0)
    assert [(message.rid, message.routed_dp_rank) for message in server.sent] == [("a", 0), ("b", 1), ("c", 0)]
    server.accept("d", routed_dp_rank=1)
    server.accept("e", routed_dp_rank=3)
    assert [message.routed_dp_rank for message in server.sent[3:]] == [1, 0], (
        "a rank that is not in cannot be asked for"
    )


def test_a_lost_ranks_requests_go_on_elsewhere_as_if_nothing_had_happened() -> None:
    server = Server()
    server.view(1, r0=0, r1=0)
    server.accept("a", sampling_params=Parameters(custom_params={"mine": 1}))
    server.deliver("a", [1, 2], "ab", 2)
    server.front_end.on_gone(0, 0)
    moved = server.sent[-1]
    assert (moved.rid, moved.routed_dp_rank) == ("a~1", 1)
    assert moved.sampling_params.custom_params == {"mine": 1, DELIVERED: [1, 2], LOST_LIFE: [0, 0, "a"]}
    assert moved.sampling_params.max_new_tokens == 8, "the scheduler counts the delivered tokens as output"
    assert server.deliver("a", [3], "c", 3).rids == ["LATE"]
    seen = server.deliver("a~1", [3], "abc", 3)
    assert (seen.rids, seen.output_ids, seen.output_strs) == (["a"], [[3]], ["c"])
    assert (seen.prompt_tokens, seen.completion_tokens) == ([2], [3])
    server.view(2, r1=0)
    server.front_end.on_gone(1, 0)
    server.view(4, r0=1)
    again = server.sent[-1]
    assert (again.rid, again.sampling_params.custom_params[DELIVERED]) == ("a~2", [1, 2, 3])
    assert server.deliver("a~2", [4], "abcd", 4, finished=True).output_strs == ["d"]
    assert len(server.front_end.ledger) == 0
    assert server.front_end._kept == {}


def test_what_cannot_be_continued_is_begun_anew_and_not_repeated() -> None:
    server = Server()
    server.view(1, r0=0, r1=0)
    server.accept("a", return_hidden_states=True)
    server.deliver("a", [1, 2], "ab", 2)
    server.front_end.on_gone(0, 0)
    assert server.sent[-1].sampling_params.custom_params is None
    seen = server.deliver("a~1", [1, 2, 3], "abc", 3)
    assert (seen.output_ids, seen.output_strs) == ([[3]], ["c"])
    assert seen.output_token_logprobs_val == [[3.0]]
    assert seen.input_token_logprobs_val == [[]]


def test_a_view_that_still_has_a_rank_that_is_gone_does_not_bring_it_back() -> None:
    server = Server()
    server.view(1, r0=0, r1=0)
    server.front_end.on_gone(0, 0)
    server.view(1, r0=0, r1=0)
    assert server.front_end.ranks.live == {1: 0}
    server.view(3, r0=1, r1=0)
    assert server.front_end.ranks.live == {0: 1, 1: 0}


def test_an_abort_is_answered_at_once_while_no_rank_has_the_request() -> None:
    server = Server()
    server.accept("a")
    server.front_end.send(AbortReq("a"))
    assert server.answered == [("a", None)]


def test_an_abort_is_answered_by_the_rank_or_when_the_rank_is_lost() -> None:
    server = Server()
    server.view(1, r0=0)
    server.accept("a")
    server.front_end.send(AbortReq("a"))
    assert server.answered == [], "the rank will answer"
    server.front_end.on_gone(0, 0)
    assert server.answered == [("a", None)]


def test_an_aborted_request_is_answered_once() -> None:
    server = Server()
    server.view(1, r0=0)
    server.accept("a")
    assert server.front_end.abort_answer(AbortReq("a"))
    assert not server.front_end.abort_answer(AbortReq("a")), "told twice"
    assert server.front_end._kept == {}


def test_when_all_are_dead_requests_wait_and_then_are_told_to_try_again() -> None:
    calls: list[Any] = []
    server = Server(later=lambda seconds, call: calls.append(call))
    server.view(1, r0=0)
    server.accept("a")
    server.front_end.on_gone(0, 0)
    assert server.answered == []
    server.now = 31.0
    calls.pop()()
    ((rid, reason),) = server.answered
    assert rid == "a"
    assert reason["status_code"] == 503
    assert "try again" in reason["message"]


def test_a_request_that_lacked_only_the_word_that_it_is_finished_is_told_so_with_its_counts() -> None:
    server = Server()
    server.view(1, r0=0, r1=0)
    server.accept("a", sampling_params=Parameters(max_new_tokens=2))
    server.deliver("a", [1, 2], "ab", 2)
    server.front_end.on_gone(0, 0)
    assert server.answered == [("a", {"type": "length", "length": 2})]
    assert server.prompt_tokens == {"a": 2}
    assert len(server.sent) == 1, "nothing is sent again"


def test_a_health_check_is_sent_once_and_leaves_nothing_behind() -> None:
    server = Server(health_checks=("HEALTH_CHECK",))
    server.view(1, r0=0, r1=0)
    server.accept("HEALTH_CHECK_1", sampling_params=Parameters(custom_params={DELIVERED: [1]}))
    server.accept("a")
    server.front_end.send(BatchTokenizedGenerateReqInput([TokenizedGenerateReqInput("HEALTH_CHECK_2")]))
    assert [(message.rid, message.routed_dp_rank) for message in server.sent] == [
        ("HEALTH_CHECK_1", 0),
        ("a", 0),
        ("HEALTH_CHECK_2", 1),
    ], "a check that its rank dropped, of which the front end is not told, is no load"
    assert server.sent[0].sampling_params.custom_params is None, "not a client's to say, whatever id it chooses"
    assert server.deliver("HEALTH_CHECK_2", [3], "c", 1, finished=True).rids == ["HEALTH_CHECK_2"]
    server.front_end.on_gone(0, 0)
    assert [message.rid for message in server.sent[3:]] == ["a~1"], "a check is not replayed: no client waits for it"
    assert (len(server.front_end.ledger), server.answered) == (1, [])


def test_while_no_rank_is_in_the_last_health_check_waits() -> None:
    server = Server(health_checks=("HEALTH_CHECK",))
    server.accept("HEALTH_CHECK_1")
    server.accept("HEALTH_CHECK_2")
    server.accept("a")
    assert server.sent == []
    server.view(1, r0=0, r1=0)
    server.view(2, r0=0, r1=0)
    assert [message.rid for message in server.sent] == ["HEALTH_CHECK_2", "a"], "one answer is enough for all checks"


def test_answers_are_not_expected_of_a_rank_that_was_taken_out() -> None:
    fewer: list[tuple[int, int]] = []
    server = Server(lost_lives=lambda lost, live: fewer.append((lost, live)))
    server.view(1, r0=0, r1=0, r2=0)
    server.view(2, r0=0, r1=0)  # planned: the view comes first, the end of the process later
    server.front_end.on_gone(2, 0)
    assert fewer == [(1, 2)]
    server.front_end.on_gone(1, 0)  # not planned: the other way round
    server.view(3, r0=0)
    assert fewer == [(1, 2), (1, 1)]


def test_a_session_dies_with_its_rank_and_says_so() -> None:
    server = Server()
    server.view(1, r0=0, r1=0)
    server.accept("a", session_params=object())
    server.front_end.on_gone(0, 0)
    assert "session" in server.answered[0][1]["message"]


@pytest.mark.parametrize(("asked", "seed"), [(None, 5), (77, 77)])
def test_a_sampled_request_goes_on_with_the_seed_that_it_began_with(asked: int | None, seed: int) -> None:
    seeds = iter((5, 6))
    server = Server(deterministic=True, seeds=Seeds(lambda: next(seeds)))
    server.view(1, r0=0, r1=0)
    given = Parameters(top_k=50, sampling_seed=asked)
    server.accept("a", sampling_params=given)
    server.deliver("a", [21], "x", 1)
    server.front_end.on_gone(0, 0)
    assert [message.sampling_params.sampling_seed for message in server.sent] == [seed, seed]
    assert given.sampling_seed == asked, "the caller's own was changed"
    server.accept("b")
    assert server.sent[-1].sampling_params.sampling_seed is None, "a greedy one needs none"


def test_what_the_ledger_is_told_about_a_request() -> None:
    greedy = TokenizedGenerateReqInput("a")
    sampled = TokenizedGenerateReqInput("a", sampling_params=Parameters(top_k=50))
    assert ledger_adapter.request_of(greedy, False).inexact == ""
    assert "seed" in ledger_adapter.request_of(sampled, False).inexact
    assert ledger_adapter.request_of(sampled, True).inexact == ""
    assert ledger_adapter.request_of(greedy, False).manner is ReplayManner.RESUME
    custom = {DELIVERED: [1], LOST_LIFE: [0, 0, "of another client"]}
    forged = TokenizedGenerateReqInput("a", sampling_params=Parameters(custom_params=custom))
    assert ledger_adapter.kept_copy(forged).sampling_params.custom_params is None
    assert set(forged.sampling_params.custom_params) == {DELIVERED, LOST_LIFE}, "the caller's own was changed"


def test_written_arguments_come_back_and_are_private(tmp_path: Path) -> None:
    path = tmp_path / "written"
    value = {"a": (1, [2, {3}], {"x": None}), "b": {1: "number", (2, 3): frozenset({4})}, "c": 0.1, "eep:kind": "mine"}
    recipe.write(path, value)
    assert recipe.read(path) == value
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(recipe.UnwritableValue, match=r"the arguments\.f"):
        recipe.to_json({"f": lambda: None})
    with pytest.raises(recipe.UnwritableValue, match="not of SGLang or eep"):
        recipe.to_json(Parameters())
    with pytest.raises(ValueError, match="not of SGLang or eep"):
        recipe.from_json({"eep:kind": "dataclass subprocess:Popen", "eep:value": {"fields": {}, "extra": {}}})


def test_an_output_that_says_less_of_some_requests_is_not_taken_for_one_of_fewer() -> None:
    short = SimpleNamespace(
        rids=["a", "b"], output_ids=[[1]], finished_reasons=[None] * 2, prompt_tokens=[1] * 2, cached_tokens=[0] * 2
    )
    with pytest.raises(ValueError, match="shorter"):
        list(ledger_adapter.rows_of(short))


def test_a_directory_that_has_something_in_it_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be removed when the server ends, or be that of another server."""
    monkeypatch.setattr(options, "required", lambda: SimpleNamespace(faults=False, max_ranks=2, host=None))
    monkeypatch.setenv(options.DIRECTORY, str(tmp_path / "new"))
    tokenizer_hooks._prepare_directory()
    assert (tmp_path / "new" / "key").exists()
    with pytest.raises(SystemExit, match="is not empty"):
        tokenizer_hooks._prepare_directory()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["key", "sockets"]
