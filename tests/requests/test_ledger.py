"""The ledger of requests, by example."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from eep.requests.blame import LOST_OFTEN, MOST_FRUITLESS_MOVES, MOST_MOVES_IN_A_STORM
from eep.requests.ledger import Ledger
from eep.requests.request_records import Counts, ReplayManner, Request, RequestState


def counts(completion: int, prompt: int = 3, cached: int = 0) -> Counts:
    return Counts(prompt, completion, cached)


def running(**options: object) -> Ledger:
    """A ledger with request "a" on rank 1, incarnation 4."""
    ledger = Ledger()
    ledger.accept(Request("a", 8, **options), 0.0)  # type: ignore[arg-type]
    ledger.assigned("a", 1, 4)
    return ledger


def test_a_replay_carries_everything_delivered_once_however_often_it_moves() -> None:
    ledger = running()
    ledger.delivered("a", [1, 2], counts(2))
    (first,) = ledger.rank_lost(1, 4, 1.0).replays
    assert (first.wire, first.delivered, first.max_new_tokens) == ("a~1", (1, 2), 6)
    ledger.assigned("a", 0, 0)
    (second,) = ledger.rank_lost(0, 0, 2.0).replays
    assert (second.wire, second.delivered, second.max_new_tokens) == ("a~2", (1, 2), 6)
    ledger.assigned("a", 2, 0)
    delivery = ledger.delivered("a~2", [3], counts(3))
    assert delivery is not None
    assert delivery.tokens == (3,)
    (third,) = ledger.rank_lost(2, 0, 3.0).replays
    assert (third.delivered, third.max_new_tokens) == ((1, 2, 3), 5)
    assert ledger.moved == 3


def test_late_output_of_a_lost_rank_is_dropped() -> None:
    ledger = running()
    ledger.delivered("a", [1], counts(1))
    ledger.rank_lost(1, 4, 1.0)
    assert ledger.delivered("a", [2], counts(2)) is None
    assert ledger.delivered("a~1", [2], counts(2)) is None, "no rank has been given this life yet"
    ledger.assigned("a", 0, 0)
    assert ledger.delivered("a", [2], counts(2), finished=True) is None
    assert ledger.id_of("a") is None
    assert ledger.id_of("a~1") == "a"
    assert ledger.entry("a").delivered == [1]
    assert ledger.dropped == 3


def test_only_the_lost_incarnation_is_lost() -> None:
    ledger = running()
    assert ledger.rank_lost(1, 3, 1.0).replays == ()
    assert ledger.rank_lost(0, 4, 1.0).replays == ()
    assert ledger.keep_only({1: 4, 2: 0}, 1.0).replays == ()
    assert len(ledger.keep_only({1: 5, 2: 0}, 1.0).replays) == 1
    assert ledger.keep_only({}, 1.0).replays == (), "who waits is on no rank"


def test_counts_are_as_if_nothing_had_happened() -> None:
    ledger = running()
    ledger.delivered("a", [1, 2], counts(2, prompt=3, cached=2))
    ledger.rank_lost(1, 4, 1.0)
    ledger.assigned("a", 0, 0)
    # A rank that takes the delivered tokens for prompt, and finds all of it in its cache.
    delivery = ledger.delivered("a~1", [3], Counts(5, 1, 5), finished=True)
    assert delivery is not None
    assert delivery.counts == Counts(3, 3, 2)
    assert "a" not in ledger


def test_a_restart_withholds_what_the_client_has() -> None:
    ledger = running(manner=ReplayManner.RESTART)
    ledger.delivered("a", [1, 2, 3], counts(3), text="abc")
    (replay,) = ledger.rank_lost(1, 4, 1.0).replays
    assert replay.manner is ReplayManner.RESTART
    ledger.assigned("a", 0, 0)
    first = ledger.delivered("a~1", [1, 2], counts(2), text="ab")
    second = ledger.delivered("a~1", [3, 4], counts(4), text="cd")
    assert first is not None
    assert second is not None
    assert (first.tokens, first.text, first.withheld) == ((), "", 2)
    assert (second.tokens, second.text, second.withheld) == ((4,), "d", 1)
    assert second.counts.completion == 4
    assert not first.diverged
    assert not second.diverged


def test_a_restart_that_goes_another_way_is_over() -> None:
    ledger = running(manner=ReplayManner.RESTART, inexact="sampled without a seed")
    ledger.delivered("a", [1, 2], counts(2))
    (replay,) = ledger.rank_lost(1, 4, 1.0).replays
    assert replay.inexact == "sampled without a seed"
    ledger.assigned("a", 0, 0)
    delivery = ledger.delivered("a~1", [1, 5, 6], counts(3), text="abc")
    assert delivery is not None
    assert delivery.diverged
    assert (delivery.tokens, delivery.text) == ((), ""), "it would not fit to what the client has"
    assert "a" not in ledger
    assert ledger.delivered("a~1", [7], counts(4)) is None


def test_a_request_that_takes_rank_after_rank_with_it_is_not_given_to_all_of_them() -> None:
    ledger = Ledger()
    for name in ("bad", "good"):
        ledger.accept(Request(name, 99), 0.0)
    for life in range(MOST_FRUITLESS_MOVES + 1):
        ledger.assigned("bad", 0, life)
        ledger.assigned("good", 0, life)
        wire = f"good~{life}" if life else "good"
        assert ledger.delivered(wire, [life], counts(1)) is not None
        lost = ledger.rank_lost(0, life, float(life))
        wanted = ["bad", "good"] if life < MOST_FRUITLESS_MOVES else ["good"]
        assert [replay.id for replay in lost.replays] == wanted
    assert lost.harmful == (("bad", LOST_OFTEN.format(count=MOST_FRUITLESS_MOVES + 1)),)
    assert ledger.waiting() == ["good"]
    assert ledger.loads.requests() == {}


def test_when_output_was_lost_every_request_goes_on_from_what_its_client_has() -> None:
    ledger = Ledger()
    for name, rank in (("a", 0), ("b", 1)):
        ledger.accept(Request(name, 9), 0.0)
        ledger.assigned(name, rank, 0)
    ledger.accept(Request("waiting", 9), 0.0)
    ledger.delivered("a", [1, 2], counts(2))
    ledger.abort("b")
    lost = ledger.output_lost(1.0)
    assert [(replay.wire, replay.delivered) for replay in lost.replays] == [("a~1", (1, 2))]
    assert lost.aborted == ("b",)
    assert ledger.waiting() == ["a", "waiting"]
    assert ledger.loads.requests() == {}
    assert ledger.delivered("a", [3], counts(3)) is None, "it comes late"


def test_a_request_in_a_storm_of_losses_is_not_blamed_for_them() -> None:
    """One that is not streamed gives no token before its end, and every rank is lost before that, its own and others."""
    ledger = Ledger()
    ledger.accept(Request("long", 99), 0.0)
    for life in range(MOST_MOVES_IN_A_STORM + 1):
        ledger.assigned("long", 0, life)
        ledger.rank_lost(1, life, 10.0 * life)
        lost = ledger.rank_lost(0, life, 10.0 * life + 5)
        assert bool(lost.harmful) == (life == MOST_MOVES_IN_A_STORM)
    assert lost.harmful == (("long", LOST_OFTEN.format(count=MOST_MOVES_IN_A_STORM + 1)),)


def test_what_waits_goes_in_the_order_of_acceptance_whatever_happened_since() -> None:
    ledger = Ledger()
    for name in "abc":
        ledger.accept(Request(name, 8), 0.0)
    ledger.assigned("a", 0, 0)
    ledger.assigned("b", 1, 0)
    assert (ledger.waiting(), ledger.loads.requests()) == (["c"], {0: 1, 1: 1})
    ledger.rank_lost(1, 0, 1.0)
    ledger.rank_lost(0, 0, 2.0)
    assert (ledger.waiting(), ledger.loads.requests()) == (["a", "b", "c"], {})
    ledger.ended("b")
    assert ledger.give_up(2.0, 2.0) == ["c"]
    assert ledger.waiting() == ["a"]


def test_nothing_delivered_is_nothing_to_differ_from() -> None:
    ledger = running(inexact="sampled without a seed")
    (replay,) = ledger.rank_lost(1, 4, 1.0).replays
    assert replay.inexact == ""


def test_text_is_cut_where_the_client_has_it_even_when_it_comes_in_pieces() -> None:
    ledger = running()
    ledger.delivered("a", [1, 2], counts(2), text="héllo")
    ledger.rank_lost(1, 4, 1.0)
    ledger.assigned("a", 0, 0)
    texts = [ledger.delivered("a~1", [3], counts(3), text=piece) for piece in ("hé", "llo wor", "ld")]
    assert [delivery.text for delivery in texts if delivery] == ["", " wor", "ld"]


def test_aborted_requests_are_answered_once_and_never_replayed() -> None:
    ledger = running()
    assert ledger.abort("a"), "its rank will answer"
    assert ledger.delivered("a", [1], counts(1)) is not None, "until then it may still send"
    lost = ledger.rank_lost(1, 4, 1.0)
    assert (lost.replays, lost.aborted) == ((), ("a",))
    assert ledger.abort("a"), "it has ended, and was answered"
    ledger.accept(Request("b"), 0.0)
    assert not ledger.abort("b"), "no rank has it: the caller must answer"
    assert len(ledger) == 0


def test_a_request_that_cannot_move_fails() -> None:
    ledger = running(immovable="its session was on that rank")
    assert ledger.rank_lost(1, 4, 1.0).failed == (("a", "its session was on that rank"),)
    assert len(ledger) == 0


def test_a_request_that_has_all_its_tokens_is_finished() -> None:
    ledger = running()
    ledger.delivered("a", range(8), counts(8))
    assert ledger.rank_lost(1, 4, 1.0).complete == ("a",)
    assert len(ledger) == 0


def test_requests_wait_in_order_until_the_caller_gives_up() -> None:
    ledger = Ledger()
    for number, name in enumerate(["a", "b", "c"]):
        ledger.accept(Request(name), float(number))
    ledger.assigned("b", 0, 0)
    assert ledger.waiting() == ["a", "c"]
    assert ledger.give_up(10.0, 9.0) == ["a"]
    ledger.rank_lost(0, 0, 20.0)
    assert ledger.waiting() == ["b", "c"], "the order of acceptance, not of waiting"
    assert ledger.give_up(25.0, 9.0) == ["c"], "b has waited since its rank was lost"
    assert ledger.waiting() == ["b"]


@pytest.mark.parametrize(
    ("call", "kind", "why"),
    [
        (lambda ledger: ledger.accept(Request("a"), 0.0), ValueError, "distinct"),
        (lambda ledger: ledger.assigned("a", 0, 0), ValueError, "running"),
        (lambda ledger: ledger.replay_of("a"), ValueError, "running"),
        (lambda ledger: ledger.assigned("z", 0, 0), KeyError, "never accepted"),
    ],
)
def test_bad_calls_raise_and_change_nothing(call: Callable[[Ledger], object], kind: type[Exception], why: str) -> None:
    ledger = running()
    with pytest.raises(kind, match=why):
        call(ledger)
    entry = ledger.entry("a")
    assert (len(ledger), entry.state, entry.rank) == (1, RequestState.RUNNING, 1)


def test_an_id_that_is_a_wire_id_of_another_request_is_refused() -> None:
    ledger = running()
    ledger.rank_lost(1, 4, 0.0)
    with pytest.raises(ValueError, match="wire id"):
        ledger.accept(Request("a~1"), 0.0)
    assert ledger.waiting() == ["a"]


def test_output_of_a_request_that_was_never_accepted_is_dropped() -> None:
    ledger = running()
    assert ledger.delivered("z", [1], counts(1)) is None
    assert ledger.dropped == 1


def test_an_id_that_looks_like_a_wire_id_stays_its_own() -> None:
    ledger = running()
    ledger.accept(Request("a~1"), 0.0)
    ledger.assigned("a~1", 0, 0)
    (replay,) = ledger.rank_lost(1, 4, 1.0).replays
    assert replay.wire == "a~2"
    assert ledger.id_of("a~1") == "a~1"
