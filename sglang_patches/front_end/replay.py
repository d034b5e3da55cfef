"""In the front end: every request is in the ledger, goes to a rank that is in, and is replayed when that rank is lost.
A health check is no request: it is sent to a rank that is in, once, and never replayed.

What goes to the schedulers passes through :meth:`FrontEnd.send`, and what comes back through :meth:`FrontEnd.output` and
:meth:`FrontEnd.abort_answer`, where a request that has moved gets its own id, counts and continuation back. It stands in
SGLang's TokenizerManager (:mod:`sglang_patches.front_end.tokenizer_hooks`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from eep.observe.metrics import MetricsWriter
from eep.requests.ledger import MOST_FRUITLESS_MOVES, Ledger, choose_rank
from eep.requests.request_records import LossOutcome
from eep.view import View
from sglang_patches.front_end import finish_reasons, ledger_adapter
from sglang_patches.sampling.seeds import Seeds

logger = logging.getLogger(__name__)

DEFAULT_WAIT_LIMIT = 300.0
_LOOKS_EVERY = 1.0
_DIVERGED = (
    "the rank that served this request was lost, it was begun anew on another, as what it returns cannot be continued, and "
    "there it went another way than what you have been sent"
)
_HARMFUL = (
    f"{MOST_FRUITLESS_MOVES + 1} ranks in a row were lost while they served this request, which may be what ends them"
)


class FrontEnd:
    """``dispatch`` sends a message to the controller; ``answer(id, finish_reason, prompt_tokens)`` ends a request with our
    own words; ``drop(wire)`` has the rank that serves it stop.

    All methods are for the thread of the server's event loop. ``later(seconds, call)`` calls back there. Ids that begin
    with one of ``health_checks`` are those of health checks.
    """

    def __init__(
        self,
        dispatch: Callable[[Any], None],
        answer: Callable[[str, dict[str, Any] | None, int], None],
        drop: Callable[[str], None],
        *,
        deterministic: bool = False,
        seeds: Seeds | None = None,
        health_checks: tuple[str, ...] = (),
        wait_limit: float = DEFAULT_WAIT_LIMIT,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], object] | None = None,
        lost_lives: Callable[[int, int], None] | None = None,
    ) -> None:
        self.ledger = Ledger()
        self.live: dict[int, int] = {}
        self._gone: dict[int, int] = {}
        self._kept: dict[str, Any] = {}
        self._check: Any = None
        self._dispatch, self._answer, self._drop = dispatch, answer, drop
        self._deterministic, self._seeds = deterministic, seeds
        self._health_checks = health_checks
        self._wait_limit, self._clock = wait_limit, clock
        self._later = later or (lambda seconds, call: None)
        self._lost_lives = lost_lives or (lambda lost, live: None)
        self._looking = False
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
        """All of them, or none: an error is told to their client, who then waits for none of them."""
        for message in messages:
            ledger_adapter.check_types(message.sampling_params)
        mine: list[str] = []
        try:
            for message in messages:
                if message.rid.startswith(self._health_checks):
                    self._send_check(message)
                    continue
                self.ledger.accept(ledger_adapter.request_of(message, self._deterministic), self._clock())
                mine.append(message.rid)
                self._kept[message.rid] = ledger_adapter.kept_copy(message, self._seeds)
            self._send_what_waits(mine)
        except Exception:
            for request_id in mine:
                if self.ledger.id_of(request_id) is not None:
                    self._drop(request_id)
                self.ledger.ended(request_id)
                self._kept.pop(request_id, None)
            raise

    def _send_check(self, message: Any) -> None:
        """A busy scheduler drops a health check without a word, and SGLang forgets it without an abort: the ledger would keep
        it for ever. While nobody is in the last one waits, for the first ever may come before the first view. The last is
        enough: any answer of a rank is one to all checks."""
        rank = self._rank_for(message)
        self._check = message if rank is None else None
        if rank is not None:
            check = ledger_adapter.kept_copy(message, self._seeds)
            check.routed_dp_rank = rank
            self._dispatch(check)

    def _rank_for(self, message: Any) -> int | None:
        asked = getattr(message, "routed_dp_rank", None)
        return asked if asked in self.live else choose_rank(self.live, self.ledger.loads())

    def _send_what_waits(self, mine: Collection[str] = ()) -> None:
        """One that cannot be sent is ended, and is no hindrance to the others. If it is one of ``mine``, its error is raised
        at the end."""
        if self._check is not None:
            self._send_check(self._check)
        failed: Exception | None = None
        for request_id in self.ledger.waiting():
            kept, replay = self._kept[request_id], self.ledger.replay_of(request_id)
            rank = self._rank_for(kept)
            if rank is None:
                break
            if replay.inexact:
                logger.warning("request %s may go on differently on rank %d: %s", request_id, rank, replay.inexact)
            try:
                self._dispatch(ledger_adapter.message_for(kept, replay, rank))
            except Exception as error:
                self.ledger.ended(request_id)
                if request_id in mine:
                    failed = error
                else:
                    self._end(request_id, finish_reasons.failed(f"this request cannot be sent to a rank: {error}"))
            else:
                self.ledger.assigned(request_id, rank, self.live[rank])
        self._look_later()
        if failed is not None:
            raise failed

    def _abort(self, message: Any) -> None:
        """Schedulers take an id for the beginning of ids, and so do we; each life of a request begins with its id."""
        for request_id in [each for each in self._kept if message.abort_all or each.startswith(message.rid)]:
            if not self.ledger.abort(request_id):
                self._end(request_id, None)
        self._dispatch(message)

    # From the schedulers to the front end.

    def output(self, output: Any, late: str) -> None:
        """Rewrite an output in place. Rows that nobody may see get the id ``late``, which nobody waits for."""
        for row, (wire, tokens, counts, text, finished) in enumerate(ledger_adapter.rows_of(output)):
            delivery = self.ledger.delivered(wire, tokens, counts, text=text, finished=finished)
            if delivery is None:
                if not wire.startswith(self._health_checks):  # SGLang knows whether somebody waits for a check
                    output.rids[row] = late
                continue
            if delivery.diverged:
                output.rids[row] = late
                self._drop(wire)
                self._end(delivery.id, finish_reasons.try_again(_DIVERGED))
                continue
            output.rids[row] = delivery.id
            if wire != delivery.id:
                ledger_adapter.write_back(output, row, delivery)
            if finished:
                self._kept.pop(delivery.id, None)

    def abort_answer(self, message: Any) -> bool:
        """A scheduler has dropped a request. False when it speaks of a life that is over."""
        request_id = self.ledger.id_of(message.rid)
        if request_id is None:
            return False
        message.rid = request_id
        self.ledger.ended(request_id)
        self._kept.pop(request_id, None)
        return True

    # From the supervisor.

    def on_view(self, view: View) -> None:
        """Who is in. A rank that repairs is in too: it will serve what it is sent."""
        live = {rank: view.incarnations[rank] for rank in view.active}
        before = self.live
        self.live = {rank: inc for rank, inc in live.items() if self._gone.get(rank, -1) < inc}
        if taken_out := sum(self.live.get(rank) != inc for rank, inc in before.items()):
            self._lost_lives(taken_out, len(self.live))
        self._replay(self.ledger.keep_only(self.live, self._clock()))

    def on_gone(self, rank: int, incarnation: int) -> None:
        """That life of a rank is over, whatever the last view said."""
        self._gone[rank] = max(incarnation, self._gone.get(rank, -1))
        if self.live.get(rank) == incarnation:
            del self.live[rank]
            self._lost_lives(1, len(self.live))
        self._replay(self.ledger.rank_lost(rank, incarnation, self._clock()))

    def _replay(self, lost: LossOutcome) -> None:
        for request_id in lost.aborted:
            self._end(request_id, None)
        for request_id in lost.complete:
            self._end(request_id, {"type": "length", "length": self._kept[request_id].sampling_params.max_new_tokens})
        for request_id, why in lost.failed:
            self._end(request_id, finish_reasons.try_again(f"the rank that served this request was lost, and {why}"))
        for request_id in lost.harmful:
            logger.error("request %s was on %d ranks in a row that were lost", request_id, MOST_FRUITLESS_MOVES + 1)
            self._end(request_id, finish_reasons.failed(_HARMFUL))
        if lost.replays:
            self._metrics.add("requests_moved", len(lost.replays))
            logger.info("replaying %d requests on %s", len(lost.replays), sorted(self.live) or "whoever comes back")
        self._send_what_waits()

    # What nobody can serve.

    def look(self) -> None:
        """Give up on requests that have waited for too long."""
        self._looking = False
        for request_id in self.ledger.give_up(self._clock(), self._wait_limit):
            why = f"no rank came back within {self._wait_limit:g} s to serve this request"
            self._end(request_id, finish_reasons.try_again(why))
        self._look_later()

    def _look_later(self) -> None:
        if not self._looking and self.ledger.waiting():
            self._looking = True
            self._later(min(_LOOKS_EVERY, self._wait_limit), self.look)

    def _end(self, request_id: str, finish_reason: dict[str, Any] | None) -> None:
        kept = self._kept.pop(request_id, None)
        self._answer(request_id, finish_reason, len(getattr(kept, "input_ids", None) or ()))
