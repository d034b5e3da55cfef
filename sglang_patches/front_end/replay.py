"""In the front end: every request is in the ledger, goes to a rank that is in, and is replayed when that rank is lost.
A health check is no request: it goes to a rank that is in, once, and is never replayed.

What goes to the schedulers passes through :meth:`FrontEnd.send`. What comes back passes through :meth:`FrontEnd.output` and
:meth:`FrontEnd.abort_answer`, where a request that has moved gets its own id, counts and continuation back. The front end
stands in SGLang's TokenizerManager (:mod:`sglang_patches.front_end.tokenizer_hooks`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from eep.observe.metrics import MetricsWriter
from eep.requests.ledger import Ledger
from eep.requests.rank_loads import Measure
from eep.requests.request_records import LossOutcome
from eep.view import View
from sglang_patches.addressed_life import RECEIVED
from sglang_patches.front_end import finish_reasons, ledger_adapter
from sglang_patches.front_end.request_limits import RequestLimits, check_ranges
from sglang_patches.front_end.service_state import ServiceState
from sglang_patches.sampling.seeds import Seeds

logger = logging.getLogger(__name__)

DEFAULT_WAIT_LIMIT = 300.0
DEFAULT_RECEIPT_LIMIT = 60.0
"""Above the longest step: ranks look for messages between two steps."""
_CHECKS_EVERY = 1.0
MAY_DIFFER = "may continue differently"
"""What the log says of a request that moves and is sampled without a seed."""


class FrontEnd:
    """``dispatch`` sends a message to the controller. ``answer(id, finish_reason, prompt_tokens)`` ends a request with a
    message of ours. ``drop(wire)`` makes the rank that serves it stop. ``revoke(wire)`` makes a rank that has not begun it
    not begin it; ``receipt_limit``: how many seconds ranks have to say that a request has reached them. ``renew()`` makes
    all ranks stop what they serve, and send to the next detokenizer.

    Call all methods from the thread of the server's event loop. ``later(seconds, call)`` calls back there. Ids that begin
    with one of ``health_checks`` are those of health checks. ``limits``: what the numbers of a request may be.
    ``most_open(ranks)``: how many requests may be open while so many ranks are in; None for any number. ``measure``: by what
    ranks are compared for a new request.
    """

    def __init__(
        self,
        dispatch: Callable[[Any], None],
        answer: Callable[[str, dict[str, Any] | None, int], None],
        drop: Callable[[str], None],
        *,
        deterministic: bool = False,
        seeds: Seeds | None = None,
        limits: RequestLimits | None = None,
        most_open: Callable[[int], int | None] = lambda ranks: None,
        measure: Measure = Measure.REQUESTS,
        health_checks: tuple[str, ...] = (),
        wait_limit: float = DEFAULT_WAIT_LIMIT,
        revoke: Callable[[str], None] | None = None,
        renew: Callable[[], None] | None = None,
        receipt_limit: float = DEFAULT_RECEIPT_LIMIT,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], object] | None = None,
        lost_lives: Callable[[int, int], None] | None = None,
        service: ServiceState | None = None,
    ) -> None:
        self.service = service or ServiceState()
        self.ledger = Ledger(measure)
        self.live: dict[int, int] = {}
        self.has_view = False
        """Whether it has heard who is in; not so at the very start."""
        self._gone: dict[int, int] = {}
        self._kept: dict[str, Any] = {}
        self._check: Any = None
        self._dispatch, self._answer, self._drop = dispatch, answer, drop
        self._deterministic, self._seeds, self._limits = deterministic, seeds, limits
        self._most_open = most_open
        self._health_checks = health_checks
        self._wait_limit, self._clock = wait_limit, clock
        self._revoke, self._receipt_limit = revoke or (lambda wire: None), receipt_limit
        self._renew = renew or (lambda: None)
        self._later = later or (lambda seconds, call: None)
        self._lost_lives = lost_lives or (lambda lost, live: None)
        self._is_check_scheduled = False
        self._metrics = MetricsWriter("front-end")
        self._metrics.add("requests_moved", 0)

    # From the front end to the schedulers.

    def send(self, message: Any) -> None:
        kind = type(message).__name__
        if kind.startswith("BatchTokenized"):
            self._accept(list(message))
        elif kind.startswith("Tokenized"):
            self._accept([message])
        elif kind == "AbortReq":
            self._abort(message)
        else:
            self._dispatch(message)

    def _accept(self, messages: list[Any]) -> None:
        """Accept all of them or none: after an error their client waits for none of them."""
        for message in messages:
            ledger_adapter.check_types(message)
            if self._limits is not None:
                check_ranges(message, self._limits)
        requests: list[Any] = []
        for message in messages:
            if message.rid.startswith(self._health_checks):
                self._send_check(message)
            else:
                requests.append(message)
        if requests and not self._is_full(requests):
            self._accept_requests(requests)

    def _is_full(self, messages: list[Any]) -> bool:
        """Whether these would be more requests than may be open now. Then their clients are told so, as soon as they wait."""
        most = self._most_open(len(self.live))
        why = finish_reasons.DRAINING
        if not self.service.draining:
            if most is None or len(self.ledger) + len(messages) <= most:
                return False
            why = finish_reasons.FULL.format(open=len(self.ledger))
        reason = finish_reasons.try_again(why)
        for message in messages:
            self._later(0, partial(self._answer, message.rid, reason, len(getattr(message, "input_ids", None) or ())))
        return True

    def _accept_requests(self, messages: list[Any]) -> None:
        mine: list[str] = []
        try:
            for message in messages:
                self.ledger.accept(ledger_adapter.request_of(message, self._deterministic), self._clock())
                mine.append(message.rid)
                self._kept[message.rid] = ledger_adapter.kept_copy(message, self._seeds)
            # Whatever else waits while there are ranks may be what ends ranks, and waits for another to be cleared.
            failed = [error for request_id in mine if self.live and (error := self._send_waiting(request_id))]
            self._schedule_check()
            if failed:
                raise failed[-1]
        except Exception:
            for request_id in mine:
                if self.ledger.id_of(request_id) is not None:
                    self._drop(request_id)
                self.ledger.ended(request_id)
                self._kept.pop(request_id, None)
            raise

    def _send_check(self, message: Any) -> None:
        """Health checks are not in the ledger: a busy scheduler drops one silently, and SGLang forgets it without an abort.
        While no rank is in, the last check waits, since the first may come before the first view. One is enough: an answer
        of any rank answers all checks."""
        rank = self._rank_for(message)
        self._check = message if rank is None else None
        if rank is not None:
            check = ledger_adapter.kept_copy(message, self._seeds)
            check.routed_dp_rank = rank
            self._dispatch(check)

    def _rank_for(self, message: Any, request_id: str = "") -> int | None:
        asked = getattr(message, "routed_dp_rank", None)
        if request_id and (asked not in self.live or self.ledger.entry(request_id).is_doubted):
            return self.ledger.rank_for(request_id, self.live)
        return asked if asked in self.live else self.ledger.loads.least(self.live)

    def _send_what_waits(self) -> None:
        """Other ranks are in than before: send the requests that wait. One that cannot be sent is ended, and the others go
        on."""
        if self._check is not None:
            self._send_check(self._check)
        for request_id in self.ledger.waiting() if self.live else ():
            self._send_or_end(request_id)
        self._schedule_check()

    def _send_or_end(self, request_id: str) -> None:
        error = self._send_waiting(request_id)
        if error is not None:
            self._end(request_id, finish_reasons.failed(f"the server could not send this request to a rank: {error}"))

    def _send_waiting(self, request_id: str) -> Exception | None:
        """Send a request that waits, if there is a rank for it. If it cannot be sent, it is over, and its error returned."""
        kept = self._kept[request_id]
        rank = self._rank_for(kept, request_id)
        if rank is None:
            return None  # it may be what ends ranks, and waits for one that has no other such request
        replay = self.ledger.replay_of(request_id)
        if replay.inexact:
            logger.warning("request %s %s on rank %d: %s", request_id, MAY_DIFFER, rank, replay.inexact)
        try:
            self._dispatch(ledger_adapter.message_for(kept, replay, rank, self.live[rank]))
        except Exception as error:
            self.ledger.ended(request_id)
            return error
        self.ledger.assigned(request_id, rank, self.live[rank], self._clock())
        return None

    def _abort(self, message: Any) -> None:
        """Schedulers abort every request whose id begins with the given one: all lives of a request, and all requests of a
        batch. If the id is that of an open request, the front end ends no other: a scheduler may, and answers for it."""
        if message.rid in self._kept and not message.abort_all:
            meant = [message.rid]
        else:
            meant = [each for each in self._kept if message.abort_all or each.startswith(message.rid)]
        for request_id in meant:
            if not self.ledger.abort(request_id):
                self._end(request_id, None)
        self._dispatch(message)

    # From the schedulers to the front end.

    def output(self, output: Any, late: str) -> None:
        """Rewrite an output in place. Rows that no client may see get the id ``late``, for which no client waits."""
        for row, (wire, tokens, counts, text, finished) in enumerate(ledger_adapter.rows_of(output)):
            delivery = self.ledger.delivered(wire, tokens, counts, text=text, finished=finished)
            if delivery is None:
                if not wire.startswith(self._health_checks):  # SGLang knows whether a client waits for a check
                    output.rids[row] = late
                continue
            if delivery.diverged:
                output.rids[row] = late
                self._drop(wire)
                self._end(delivery.id, finish_reasons.try_again(finish_reasons.DIVERGED))
                continue
            output.rids[row] = delivery.id
            if wire != delivery.id:
                ledger_adapter.write_back(output, row, delivery)
            if finished:
                self._kept.pop(delivery.id, None)
        self._send_held_back()

    def _send_held_back(self) -> None:
        """Requests wait while there are ranks only if they may be what ends ranks: now one of those may be cleared."""
        while (request_id := self.ledger.held_back(self.live)) is not None:
            self._send_or_end(request_id)

    def abort_answer(self, message: Any) -> bool:
        """A scheduler has dropped a request. False if the request has moved to another rank since, or if the scheduler only
        says that it has received the request."""
        if getattr(message, "abort_message", None) == RECEIVED:
            self.ledger.received(message.rid)
            return False
        request_id = self.ledger.id_of(message.rid)
        if request_id is None:
            return False
        message.rid = request_id
        self.ledger.ended(request_id)
        self._kept.pop(request_id, None)
        self._send_held_back()
        return True

    # From the supervisor.

    def on_view(self, view: View) -> None:
        """A new view says which ranks are in. A rank that repairs is in too: it will serve what it is sent."""
        live = {rank: view.incarnations[rank] for rank in view.active}
        before, self.has_view = self.live, True
        self.live = {rank: inc for rank, inc in live.items() if self._gone.get(rank, -1) < inc}
        if taken_out := sum(self.live.get(rank) != inc for rank, inc in before.items()):
            self._lost_lives(taken_out, len(self.live))
        self._replay(self.ledger.keep_only(self.live, self._clock()))

    def on_gone(self, rank: int, incarnation: int, failed: bool = False) -> None:
        """That incarnation of a rank has ended, whatever the last view said. ``failed``: an exception ended it."""
        self._gone[rank] = max(incarnation, self._gone.get(rank, -1))
        if self.live.get(rank) == incarnation:
            del self.live[rank]
            self._lost_lives(1, len(self.live))
        self._replay(self.ledger.rank_lost(rank, incarnation, self._clock(), failed=failed))

    def on_detokenizer_gone(self) -> None:
        """The detokenizer has ended, and the next has not begun. Output that was on its way is lost, and so is how far each
        text was decoded: every request goes on from what its client has."""
        for wire in self.ledger.unreceived(self._clock(), 0.0):
            self._revoke(wire)  # one that has not begun is not to begin after the order to stop
        lost = self.ledger.output_lost(self._clock())
        self._renew()  # before a request is sent again: a rank that stops all that it serves would stop that too
        self._replay(lost, finish_reasons.OUTPUT_LOST)

    def _replay(self, lost: LossOutcome, cause: str = finish_reasons.RANK_LOST) -> None:
        for request_id in lost.aborted:
            self._end(request_id, None)
        for request_id in lost.complete:
            self._end(request_id, {"type": "length", "length": self._kept[request_id].sampling_params.max_new_tokens})
        for request_id, why in lost.failed:
            self._end(request_id, finish_reasons.try_again(cause.format(why=why)))
        for request_id, why in lost.harmful:
            logger.error("request %s is ended: %s", request_id, why)
            self._end(request_id, finish_reasons.failed(finish_reasons.HARMFUL.format(why=why)))
        if lost.replays:
            self._metrics.add("requests_moved", len(lost.replays))
            logger.info("replaying %d requests on ranks %s", len(lost.replays), sorted(self.live) or "that come back")
        self._send_what_waits()

    # Requests that no rank can serve.

    def end_stale_requests(self) -> None:
        """End the requests that have waited too long for a rank, and send those again that did not reach their ranks."""
        self._is_check_scheduled = False
        if wires := self.ledger.unreceived(self._clock(), self._receipt_limit):
            logger.warning("%d requests did not reach their ranks within %g s", len(wires), self._receipt_limit)
            for wire in wires:
                self._revoke(wire)
            self._replay(self.ledger.never_received(wires, self._clock()))
        for request_id in self.ledger.give_up(self._clock(), self._wait_limit):
            why = f"no rank came back within {self._wait_limit:g} s to serve this request"
            self._end(request_id, finish_reasons.try_again(why))
        self._schedule_check()

    def end_all(self, why: str) -> int:
        """End every request, for the server ends. How many there were."""
        open_requests = list(self._kept)
        for request_id in open_requests:
            self.ledger.ended(request_id)
            self._end(request_id, finish_reasons.try_again(why))
        return len(open_requests)

    def _schedule_check(self) -> None:
        if not self._is_check_scheduled and (self.ledger.has_waiting or self.ledger.has_unreceived):
            self._is_check_scheduled = True
            self._later(min(_CHECKS_EVERY, self._wait_limit), self.end_stale_requests)

    def _end(self, request_id: str, finish_reason: dict[str, Any] | None) -> None:
        kept = self._kept.pop(request_id, None)
        self._answer(request_id, finish_reason, len(getattr(kept, "input_ids", None) or ()))
