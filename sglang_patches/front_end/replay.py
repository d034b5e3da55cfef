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
from eep.operations.operation_request import RoleName
from eep.requests.ledger import Ledger
from eep.requests.rank_loads import Measure
from eep.requests.request_records import LossOutcome
from eep.view import View
from sglang_patches import mask_mark
from sglang_patches.addressed_life import RECEIVED
from sglang_patches.front_end import finish_reasons, ledger_adapter
from sglang_patches.front_end.admission import Admission
from sglang_patches.front_end.masked_requests import MaskedRequests
from sglang_patches.front_end.rank_orders import RankOrders
from sglang_patches.front_end.request_ends import RequestEnds
from sglang_patches.front_end.request_limits import RequestLimits
from sglang_patches.front_end.request_sender import RequestSender
from sglang_patches.front_end.service_state import ServiceState
from sglang_patches.front_end.serving_ranks import ServingRanks
from sglang_patches.sampling.seeds import Seeds

logger = logging.getLogger(__name__)

DEFAULT_WAIT_LIMIT = 300.0
DEFAULT_RECEIPT_LIMIT = 60.0
"""Above the longest step: ranks look for messages between two steps."""
_CHECKS_EVERY = 1.0


class FrontEnd:
    """``dispatch`` sends a message to the controller. ``answer(id, finish_reason, prompt_tokens)`` ends a request with a
    message of ours. ``receipt_limit``: how many seconds ranks have to say that a request has reached them.
    ``leave_limit``: how many seconds the requests of a rank have to end that is to serve none.

    Call all methods from the thread of the server's event loop. ``later(seconds, call)`` calls back there. Ids that begin
    with one of ``health_checks`` are those of health checks. ``limits``, ``most_open``: see :class:`.Admission`.
    ``measure``: by what ranks are compared for a new request.
    """

    def __init__(
        self,
        dispatch: Callable[[Any], None],
        answer: Callable[[str, dict[str, Any] | None, int], None],
        orders: RankOrders,
        *,
        deterministic: bool = False,
        seeds: Seeds | None = None,
        limits: RequestLimits | None = None,
        most_open: Callable[[int], int | None] = lambda ranks: None,
        measure: Measure = Measure.REQUESTS,
        health_checks: tuple[str, ...] = (),
        wait_limit: float = DEFAULT_WAIT_LIMIT,
        receipt_limit: float = DEFAULT_RECEIPT_LIMIT,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], object] | None = None,
        lost_lives: Callable[[int, int], None] | None = None,
        leave_limit: float = 0.0,
        service: ServiceState | None = None,
    ) -> None:
        self.service = service or ServiceState()
        self.ledger = Ledger(measure)
        self.ranks = ServingRanks()
        self._sender = RequestSender(dispatch, self.ledger, self.ranks, seeds, clock)
        self._kept = self._sender.kept
        self._ends = RequestEnds(answer, self._kept)
        self._dispatch, self._answer, self._orders = dispatch, answer, orders
        self._admission = Admission(self.service, limits, most_open)
        self._deterministic, self._health_checks = deterministic, health_checks
        self._wait_limit, self._receipt_limit, self._leave_limit = wait_limit, receipt_limit, leave_limit
        self._clock = clock
        self._later = later or (lambda seconds, call: None)
        self._lost_lives = lost_lives or (lambda lost, live: None)
        self._is_check_scheduled, self._metrics = False, MetricsWriter("front-end")
        self._metrics.add("requests_moved", 0)
        self.masked = MaskedRequests(self._metrics)

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
        self._admission.check(messages)
        requests: list[Any] = []
        for message in messages:
            if message.rid.startswith(self._health_checks):
                self._sender.send_check(message)
            else:
                requests.append(message)
        if requests and not self._is_full(requests):
            self._accept_requests(requests)

    def _is_full(self, messages: list[Any]) -> bool:
        """Whether these would be more requests than may be open now. Then their clients are told so, as soon as they wait."""
        why = self._admission.why_full(len(messages), len(self.ledger), len(self.ranks.live))
        if why is None:
            return False
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
                self._sender.keep(message)
            # Whatever else waits while there are ranks may be what ends ranks, and waits for another to be cleared.
            failed = [error for request_id in mine if self.ranks.serving and (error := self._sender.send(request_id))]
            self._schedule_check()
            if failed:
                raise failed[-1]
        except Exception:
            for request_id in mine:
                if self.ledger.id_of(request_id) is not None:
                    self._orders.drop(request_id)
                self.ledger.ended(request_id)
                self._kept.pop(request_id, None)
            raise

    def _send_what_waits(self) -> None:
        """Other ranks are in than before: send the requests that wait. One that cannot be sent is ended, and the others go
        on."""
        self._sender.send_waiting_check()
        for request_id in self.ledger.waiting() if self.ranks.serving else ():
            self._send_or_end(request_id)
        self._schedule_check()

    def _send_or_end(self, request_id: str) -> None:
        error = self._sender.send(request_id)
        if error is not None:
            self._ends.end(
                request_id, finish_reasons.failed(f"the server could not send this request to a rank: {error}")
            )

    def _abort(self, message: Any) -> None:
        """Schedulers abort every request whose id begins with the given one: all lives of a request, and all requests of a
        batch. If the id is that of an open request, the front end ends no other: a scheduler may, and answers for it."""
        if message.rid in self._kept and not message.abort_all:
            meant = [message.rid]
        else:
            meant = [each for each in self._kept if message.abort_all or each.startswith(message.rid)]
        for request_id in meant:
            if not self.ledger.abort(request_id):
                self._ends.end(request_id, None)
        self._dispatch(message)

    # From the schedulers to the front end.

    def output(self, output: Any, late: str) -> None:
        """Rewrite an output in place. Rows that no client may see get the id ``late``, for which no client waits."""
        marked = mask_mark.take_marks(output)
        for row, (wire, tokens, counts, text, finished) in enumerate(ledger_adapter.rows_of(output)):
            delivery = self.ledger.delivered(wire, tokens, counts, text=text, finished=finished)
            if delivery is None:
                if not wire.startswith(self._health_checks):  # SGLang knows whether a client waits for a check
                    output.rids[row] = late
                continue
            if delivery.diverged:
                output.rids[row] = late
                self._orders.drop(wire)
                self._ends.end(delivery.id, finish_reasons.try_again(finish_reasons.DIVERGED))
                continue
            output.rids[row] = delivery.id
            if wire != delivery.id:
                ledger_adapter.write_back(output, row, delivery)
            if finished:
                self._kept.pop(delivery.id, None)
            if row in marked:
                self.masked.add(delivery.id)
        self._send_held_back()

    def _send_held_back(self) -> None:
        """Requests wait while there are ranks only if they may be what ends ranks: now one of those may be cleared."""
        while (request_id := self.ledger.held_back(self.ranks.serving)) is not None:
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
        if taken_out := self.ranks.enter({rank: view.incarnations[rank] for rank in view.active}):
            self._lost_lives(taken_out, len(self.ranks.live))
        for rank in self.ranks.live:
            self._metrics.set("serves_requests", rank in self.ranks.serving, str(rank))
            if rank not in self.ranks.serving:
                self._orders.tell_role(rank, "experts")  # its next life does not know
        self._replay(self.ledger.keep_only(self.ranks.live, self._clock()))

    def on_gone(self, rank: int, incarnation: int, failed: bool = False) -> None:
        """That incarnation of a rank has ended, whatever the last view said. ``failed``: an exception ended it."""
        if self.ranks.lose(rank, incarnation):
            self._lost_lives(1, len(self.ranks.live))
        self._replay(self.ledger.rank_lost(rank, incarnation, self._clock(), failed=failed))

    def on_detokenizer_gone(self) -> None:
        """The detokenizer has ended, and the next has not begun. Output that was on its way is lost, and so is how far each
        text was decoded: every request goes on from what its client has."""
        for wire in self.ledger.unreceived(self._clock(), 0.0):
            self._orders.revoke(wire)  # one that has not begun is not to begin after the order to stop
        lost = self.ledger.output_lost(self._clock())
        self._orders.renew()  # before a request is sent again: a rank that stops all that it serves would stop that too
        self._replay(lost, finish_reasons.OUTPUT_LOST)

    def _replay(self, lost: LossOutcome, cause: str = finish_reasons.RANK_LOST) -> None:
        self._ends.end_lost(lost, cause)
        if lost.replays:
            self._metrics.add("requests_moved", len(lost.replays))
            logger.info(
                "replaying %d requests on ranks %s", len(lost.replays), sorted(self.ranks.serving) or "that come back"
            )
        self._send_what_waits()

    # From an operator.

    def set_role(self, rank: int, role: RoleName) -> None:
        """From now on a rank gets no requests, or gets them again. Those that it has may end, and then move."""
        if self.ranks.role_of(rank) == role:
            return
        self.ranks.set_role(rank, role)
        self.service.recount(len(self.ranks.live), len(self.ranks.serving), self._clock())
        self._metrics.set("serves_requests", role == "both", str(rank))
        self._orders.tell_role(rank, role)  # before it is sent a request
        if role == "experts":
            self._later(self._leave_limit, partial(self.move_requests, rank))
        self._send_what_waits()

    def move_requests(self, rank: int) -> None:
        """Have other ranks go on with what a rank serves that is to serve no requests."""
        wires = self.ledger.movable(rank) if self.ranks.role_of(rank) == "experts" else []
        for wire in wires:  # before any is sent again: a rank may get it back
            self._orders.move_away(wire)
        self._replay(self.ledger.taken_back(wires, self._clock()))

    # Requests that no rank can serve.

    def end_stale_requests(self) -> None:
        """End the requests that have waited too long for a rank, and send those again that did not reach their ranks."""
        self._is_check_scheduled = False
        if wires := self.ledger.unreceived(self._clock(), self._receipt_limit):
            logger.warning("%d requests did not reach their ranks within %g s", len(wires), self._receipt_limit)
            for wire in wires:
                self._orders.revoke(wire)
            self._replay(self.ledger.taken_back(wires, self._clock()))
        for request_id in self.ledger.give_up(self._clock(), self._wait_limit):
            why = f"no rank came back within {self._wait_limit:g} s to serve this request"
            self._ends.end(request_id, finish_reasons.try_again(why))
        self._schedule_check()

    def end_all(self, why: str) -> int:
        """End every request, for the server ends. How many there were."""
        open_requests = list(self._kept)
        for request_id in open_requests:
            self.ledger.ended(request_id)
            self._ends.end(request_id, finish_reasons.try_again(why))
        return len(open_requests)

    def _schedule_check(self) -> None:
        if not self._is_check_scheduled and (self.ledger.has_waiting or self.ledger.has_unreceived):
            self._is_check_scheduled = True
            self._later(min(_CHECKS_EVERY, self._wait_limit), self.end_stale_requests)
