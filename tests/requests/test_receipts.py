"""Requests that were sent and did not reach their ranks."""

from __future__ import annotations

from eep.requests.ledger import Ledger
from eep.requests.request_records import Counts, Request


def sent(*names: str) -> Ledger:
    """A ledger whose requests were sent to rank 0 at time 0."""
    ledger = Ledger()
    for name in names:
        ledger.accept(Request(name, 8), 0.0)
        ledger.assigned(name, 0, 0, 0.0)
    return ledger


def test_a_request_that_a_rank_does_not_acknowledge_is_noticed() -> None:
    ledger = sent("word", "output", "lost", "ended")
    ledger.received("word")
    ledger.delivered("output", [1], Counts(1, 1))
    ledger.ended("ended")
    assert ledger.unreceived(59.0, 60.0) == []
    assert ledger.unreceived(60.0, 60.0) == ["lost"]


def test_it_is_sent_again_and_what_comes_of_the_first_sending_is_late() -> None:
    ledger = sent("a")
    (replay,) = ledger.taken_back(ledger.unreceived(60.0, 60.0), 60.0).replays
    assert replay.wire == "a~1"
    ledger.assigned("a", 1, 0, 60.0)
    ledger.received("a")
    assert ledger.delivered("a", [1], Counts(1, 1), finished=True) is None
    assert ledger.has_unreceived, "a receipt of the first sending is none of the second"
    assert ledger.loads.requests() == {1: 1}


def test_each_sending_without_a_token_has_twice_the_time() -> None:
    ledger = sent("a")
    ledger.taken_back(["a"], 60.0)
    ledger.assigned("a", 0, 0, 60.0)
    assert ledger.unreceived(179.0, 60.0) == []
    assert ledger.unreceived(180.0, 60.0) == ["a~1"]


def test_the_loss_of_a_rank_ends_the_wait_for_its_receipts() -> None:
    ledger = sent("a")
    ledger.rank_lost(0, 0, 1.0)
    assert not ledger.has_unreceived


def test_an_aborted_request_that_was_not_received_is_answered_and_not_sent_again() -> None:
    ledger = sent("a")
    ledger.abort("a")
    lost = ledger.taken_back(["a"], 60.0)
    assert (lost.replays, lost.aborted) == ((), ("a",))
