"""The ledger of requests: by example, and under random schedules against a model of ranks and clients."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from eep.requests.ledger import MOST_FRUITLESS_MOVES, Ledger, choose_rank
from eep.requests.request_records import Counts, Lost, Manner, Request, State

PROMPT = (7, 8, 9)


def counts(completion: int, prompt: int = 3, cached: int = 0) -> Counts:
    return Counts(prompt, completion, cached)


def running(**options: object) -> Ledger:
    """A ledger with request "a" on rank 1, incarnation 4."""
    ledger = Ledger()
    ledger.accept(Request("a", PROMPT, 8, **options), 0.0)  # type: ignore[arg-type]
    ledger.assigned("a", 1, 4)
    return ledger


def test_a_replay_carries_everything_delivered_once_however_often_it_moves() -> None:
    ledger = running()
    ledger.delivered("a", [1, 2], counts(2))
    (first,) = ledger.rank_lost(1, 4, 1.0).replays
    assert (first.wire, first.input_ids, first.max_new_tokens) == ("a~1", (7, 8, 9, 1, 2), 6)
    ledger.assigned("a", 0, 0)
    (second,) = ledger.rank_lost(0, 0, 2.0).replays
    assert (second.wire, second.input_ids, second.max_new_tokens) == ("a~2", (7, 8, 9, 1, 2), 6)
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
    assert ledger.delivered("a~1", [2], counts(2)) is None, "nobody has been given this life yet"
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
    ledger = running(manner=Manner.RESTART)
    ledger.delivered("a", [1, 2, 3], counts(3), text="abc")
    (replay,) = ledger.rank_lost(1, 4, 1.0).replays
    assert replay.manner is Manner.RESTART
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
    ledger = running(manner=Manner.RESTART, inexact="sampled without a seed")
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
        ledger.accept(Request(name, PROMPT, 99), 0.0)
    for life in range(MOST_FRUITLESS_MOVES + 1):
        ledger.assigned("bad", 0, life)
        ledger.assigned("good", 0, life)
        wire = f"good~{life}" if life else "good"
        assert ledger.delivered(wire, [life], counts(1)) is not None
        lost = ledger.rank_lost(0, life, float(life))
        wanted = ["bad", "good"] if life < MOST_FRUITLESS_MOVES else ["good"]
        assert [replay.id for replay in lost.replays] == wanted
    assert lost.harmful == ("bad",)
    assert ledger.waiting() == ["good"]
    assert ledger.loads() == {}


def test_what_waits_goes_in_the_order_of_acceptance_whatever_happened_since() -> None:
    ledger = Ledger()
    for name in "abc":
        ledger.accept(Request(name, PROMPT, 8), 0.0)
    ledger.assigned("a", 0, 0)
    ledger.assigned("b", 1, 0)
    assert (ledger.waiting(), ledger.loads()) == (["c"], {0: 1, 1: 1})
    ledger.rank_lost(1, 0, 1.0)
    ledger.rank_lost(0, 0, 2.0)
    assert (ledger.waiting(), ledger.loads()) == (["a", "b", "c"], {})
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


def test_what_cannot_move_fails_and_what_is_complete_is_finished() -> None:
    ledger = running(immovable="its session was on that rank")
    assert ledger.rank_lost(1, 4, 1.0).failed == (("a", "its session was on that rank"),)
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


def test_bad_calls_raise_and_change_nothing() -> None:
    ledger = running()
    with pytest.raises(ValueError, match="distinct"):
        ledger.accept(Request("a"), 0.0)
    with pytest.raises(ValueError, match="running"):
        ledger.assigned("a", 0, 0)
    with pytest.raises(ValueError, match="running"):
        ledger.replay_of("a")
    with pytest.raises(KeyError, match="never accepted"):
        ledger.assigned("z", 0, 0)
    assert ledger.delivered("z", [1], counts(1)) is None
    assert ledger.entry("a").state is State.RUNNING
    ledger.rank_lost(1, 4, 0.0)
    with pytest.raises(ValueError, match="wire id"):
        ledger.accept(Request("a~1"), 0.0)
    assert ledger.waiting() == ["a"]


def test_an_id_that_looks_like_a_wire_id_is_nobody_elses() -> None:
    ledger = running()
    ledger.accept(Request("a~1", PROMPT), 0.0)
    ledger.assigned("a~1", 0, 0)
    (replay,) = ledger.rank_lost(1, 4, 1.0).replays
    assert replay.wire == "a~2"
    assert ledger.id_of("a~1") == "a~1"


def test_the_least_loaded_rank_is_chosen() -> None:
    assert choose_rank([3, 1, 2], {1: 2, 2: 1, 3: 1}) == 2
    assert choose_rank([3, 1], {}) == 1
    assert choose_rank([], {0: 1}) is None


# Random schedules.

RANKS = 3


def target(name: str, length: int) -> list[int]:
    """What a fault-free run would answer."""
    return [zlib.crc32(f"{name}.{position}".encode()) % 1000 for position in range(length)]


class Schedules(RuleBasedStateMachine):
    """Ranks that produce, die and come back; messages that arrive late or after death; clients that abort.

    Each client must always have a prefix of what a fault-free run answers, and all of it in the end.
    """

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.now = 0.0
        self.incarnations = dict.fromkeys(range(RANKS), 0)
        self.up = set(range(RANKS))
        self.serving: dict[tuple[int, int], dict[str, tuple[str, int]]] = {(r, 0): {} for r in range(RANKS)}
        """On each life of a rank: wire id to (request, next position)."""
        self.in_flight: list[tuple[str, str, list[int], int, bool]] = []
        self.spoken: set[str] = set()
        """Lives that have said something."""
        self.client: dict[str, list[int]] = {}
        self.text: dict[str, str] = {}
        self.lengths: dict[str, int] = {}
        self.over: set[str] = set()
        self.excused: set[str] = set()
        """Aborted, or told to try again."""
        self.aborted: set[str] = set()

    @rule(target=requests, length=st.integers(1, 12), restart=st.booleans(), send=st.booleans())
    def accept(self, length: int, restart: bool, send: bool) -> str:
        name = f"r{len(self.client)}"
        manner = Manner.RESTART if restart else Manner.RESUME
        self.ledger.accept(Request(name, PROMPT, length, manner), self.now)
        self.client[name], self.text[name], self.lengths[name] = [], "", length
        if send:
            self.send_what_waits()
        return name

    @rule()
    def send_what_waits(self) -> None:
        for name in self.ledger.waiting():
            rank = choose_rank(self.up, self.ledger.loads())
            if rank is None:
                return
            replay = self.ledger.replay_of(name)
            assert replay.delivered == tuple(self.client[name])
            assert replay.max_new_tokens == self.lengths[name] - len(self.client[name])
            start = len(replay.delivered) if replay.manner is Manner.RESUME else 0
            self.serving[rank, self.incarnations[rank]][replay.wire] = (name, start)
            self.ledger.assigned(name, rank, self.incarnations[rank])

    @rule(data=st.data())
    def produce(self, data: st.DataObject) -> None:
        """A rank computes some tokens; their way to the client takes its time."""
        busy = [(life, wire) for life, held in self.serving.items() for wire in held]
        if not busy:
            return
        life, wire = data.draw(st.sampled_from(busy))
        self._produce(life, wire, self.serving[life][wire][1] + data.draw(st.integers(1, 3)))

    def _produce(self, life: tuple[int, int], wire: str, end: int) -> None:
        name, start = self.serving[life][wire]
        end = min(end, self.lengths[name])
        finished = end == self.lengths[name]
        self.in_flight.append((wire, name, target(name, end)[start:], end, finished))
        if finished:
            del self.serving[life][wire]
        else:
            self.serving[life][wire] = (name, end)

    @rule(steps=st.integers(1, 3))
    def serve(self, steps: int) -> None:
        """Every rank computes as many tokens for every request it has, and the clients have them at once."""
        for life, held in self.serving.items():
            for wire, (_, start) in list(held.items()):
                self._produce(life, wire, start + steps)
        while self.in_flight:
            self._deliver(self.in_flight[0])

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Messages of one life keep their order; lives overtake each other."""
        if not self.in_flight:
            return
        wire = data.draw(st.sampled_from(sorted({message[0] for message in self.in_flight})))
        self._deliver(next(message for message in self.in_flight if message[0] == wire))

    def _deliver(self, message: tuple[str, str, list[int], int, bool]) -> None:
        self.in_flight.remove(message)
        wire, name, tokens, end, finished = message
        # The text of a life counts from its first output token, whichever way it was begun.
        told = self._text(name, end - len(tokens)) if wire in self.spoken else ""
        text = self._text(name, end)[len(told) :]
        delivery = self.ledger.delivered(wire, tokens, Counts(3, end), text=text, finished=finished)
        self.spoken.add(wire)
        if delivery is None:
            return
        assert delivery.id == name
        assert name not in self.over, "output after the end"
        self.client[name] += delivery.tokens
        self.text[name] += delivery.text
        if delivery.withheld == 0:
            assert delivery.counts == Counts(3, len(self.client[name]))
        if finished:
            self.over.add(name)

    @staticmethod
    def _text(name: str, tokens: int) -> str:
        return "".join(f"<{token}>" for token in target(name, tokens))

    @rule(rank=st.integers(0, RANKS - 1), send=st.booleans())
    def kill(self, rank: int, send: bool) -> None:
        if rank not in self.up:
            return
        life = (rank, self.incarnations[rank])
        self.up.discard(rank)
        del self.serving[life]  # what it had sent may still arrive
        self._answer(self.ledger.rank_lost(*life, self.now))
        if send:
            self.send_what_waits()

    @rule(data=st.data())
    def missed_a_death(self, data: st.DataObject) -> None:
        """Several die, and only the next view tells of it."""
        dead = data.draw(st.sets(st.integers(0, RANKS - 1)))
        for rank in dead & self.up:
            del self.serving[rank, self.incarnations[rank]]
        self.up -= dead
        self._answer(self.ledger.keep_only({rank: self.incarnations[rank] for rank in self.up}, self.now))

    def _answer(self, lost: Lost) -> None:
        for name in lost.aborted:
            assert name in self.excused
            self.over.add(name)
        assert lost.failed == ()
        assert lost.complete == ()

    @rule(rank=st.integers(0, RANKS - 1))
    def revive(self, rank: int) -> None:
        if rank not in self.up:
            self.up.add(rank)
            self.incarnations[rank] += 1
            self.serving[rank, self.incarnations[rank]] = {}

    @rule(name=consumes(requests))
    def abort(self, name: str) -> None:
        if name in self.over:
            return
        self.excused.add(name)
        self.aborted.add(name)
        if not self.ledger.abort(name):
            self.over.add(name)

    @rule(seconds=st.floats(0.1, 5.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for name in self.ledger.give_up(self.now, 30.0):
            self.excused.add(name)
            self.over.add(name)

    @invariant()
    def clients_have_a_prefix_of_the_fault_free_answer(self) -> None:
        for name, received in self.client.items():
            assert received == target(name, self.lengths[name])[: len(received)]
            assert self._text(name, self.lengths[name]).startswith(self.text[name])

    @invariant()
    def an_aborted_request_is_never_replayed(self) -> None:
        assert not self.aborted & set(self.ledger.waiting())

    @invariant()
    def nothing_is_kept_of_what_is_over(self) -> None:
        assert not any(name in self.ledger for name in self.over)

    def teardown(self) -> None:
        """Faults stop: everything that nobody gave up on is answered in full."""
        for rank in range(RANKS):
            self.revive(rank)
        self.send_what_waits()
        while self.in_flight:
            self._deliver(self.in_flight[0])
        for held in self.serving.values():
            for wire, (name, start) in list(held.items()):
                length = self.lengths[name]
                self._deliver_now(wire, name, target(name, length)[start:], length)
        for name in set(self.client) - self.excused:
            assert self.client[name] == target(name, self.lengths[name])
            assert self.text[name] == self._text(name, self.lengths[name])
        assert len(self.ledger) == 0

    def _deliver_now(self, wire: str, name: str, tokens: list[int], end: int) -> None:
        self.in_flight.append((wire, name, tokens, end, True))
        self._deliver(self.in_flight[-1])


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
