"""The ledger of requests under random schedules, against a model of ranks and clients."""

from __future__ import annotations

import zlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from eep.requests.ledger import Ledger
from eep.requests.request_records import Counts, LossOutcome, ReplayManner, Request

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
        self.heard: set[str] = set()
        """Lives that the ledger was told of by their ranks, or that have computed something."""
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
        manner = ReplayManner.RESTART if restart else ReplayManner.RESUME
        self.ledger.accept(Request(name, length, manner), self.now)
        self.client[name], self.text[name], self.lengths[name] = [], "", length
        if send:
            self.send_what_waits()
        return name

    @rule()
    def send_what_waits(self) -> None:
        for name in self.ledger.waiting():
            rank = self.ledger.loads.least(self.up)
            if rank is None:
                return
            replay = self.ledger.replay_of(name)
            assert replay.delivered == tuple(self.client[name])
            assert replay.max_new_tokens == self.lengths[name] - len(self.client[name])
            start = len(replay.delivered) if replay.manner is ReplayManner.RESUME else 0
            self.serving[rank, self.incarnations[rank]][replay.wire] = (name, start)
            self.ledger.assigned(name, rank, self.incarnations[rank], self.now)

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
        self.heard.add(wire)
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
    def lose_a_request_on_its_way(self, data: st.DataObject) -> None:
        """It never reaches its rank, and no process hears of that."""
        silent = [(life, wire) for life, held in self.serving.items() for wire in held if wire not in self.heard]
        if silent:
            life, wire = data.draw(st.sampled_from(silent))
            del self.serving[life][wire]

    @rule()
    def say_what_was_received(self) -> None:
        for held in self.serving.values():
            for wire in held:
                self.heard.add(wire)
                self.ledger.received(wire)

    @rule(send=st.booleans())
    def notice_what_was_not_received(self, send: bool) -> None:
        """Some of it reached a rank that is slow to say so. That rank goes on with it."""
        wires = self.ledger.unreceived(self.now, 0.0)
        self._answer(self.ledger.taken_back(wires, self.now))
        if send:
            self.send_what_waits()

    @rule(data=st.data(), send=st.booleans())
    def lose_output_on_its_way(self, data: st.DataObject, send: bool) -> None:
        """Some of what is in flight is lost, and all ranks are told to stop what they serve."""
        self.in_flight = [message for message in self.in_flight if data.draw(st.booleans())]
        self._answer(self.ledger.output_lost(self.now))
        for held in self.serving.values():
            held.clear()
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

    def _answer(self, lost: LossOutcome) -> None:
        for name in lost.aborted:
            assert name in self.excused
            self.over.add(name)
        for name, _ in lost.harmful:  # it was moved too often
            self.excused.add(name)
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
        """Faults stop: every request that was neither aborted nor given up is answered in full."""
        for rank in range(RANKS):
            self.revive(rank)
        self.notice_what_was_not_received(send=True)
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
TestSchedules.settings = settings(max_examples=300, stateful_step_count=40)
