"""In the front end: every request is in the ledger, goes to a rank that is in, and is replayed when that rank is lost.
A health check is no request: it is sent to a rank that is in, once, and never replayed.

SGLang's TokenizerManager is left as it is. We stand at its two sockets: what it sends to the schedulers passes through
:meth:`FrontEnd.send`, and what comes back through :meth:`FrontEnd.output` and :meth:`FrontEnd.abort_answer`, where a
request that has moved gets its own id, counts and continuation back. Who is in is told by a watcher of the
supervisor that runs in the controller.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from eep.control.private import PrivateDirectory
from eep.control.watcher import Watcher
from eep.fault_orders import allow_in
from eep.observe.metrics import Sheet
from eep.requests import Ledger, Lost, choose_rank
from eep.view import View
from sglang_patches import garbage, hooks, ledger_adapter, options, questions
from sglang_patches.options import DIRECTORY
from sglang_patches.seeds import Seeds

logger = logging.getLogger(__name__)

WAIT_LIMIT = "EEP_WAIT_LIMIT_S"
_DEFAULT_WAIT_LIMIT = 300.0
_LOOKS_EVERY = 1.0
_MANAGER = "managers.tokenizer_manager.TokenizerManager."
_ATTRIBUTE = "_eep_front_end"


class FrontEnd:
    """``dispatch`` sends a message to the controller; ``answer(id, finish_reason, prompt_tokens)`` ends a request with our
    own words.

    All methods are for the thread of the server's event loop. ``later(seconds, call)`` calls back there. Ids that begin
    with one of ``health_checks`` are those of health checks.
    """

    def __init__(
        self,
        dispatch: Callable[[Any], None],
        answer: Callable[[str, dict[str, Any] | None, int], None],
        *,
        deterministic: bool = False,
        seeds: Seeds | None = None,
        health_checks: tuple[str, ...] = (),
        wait_limit: float = _DEFAULT_WAIT_LIMIT,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], object] | None = None,
        lost_lives: Callable[[int, int], None] | None = None,
    ) -> None:
        self.ledger = Ledger()
        self.live: dict[int, int] = {}
        self._gone: dict[int, int] = {}
        self._kept: dict[str, Any] = {}
        self._check: Any = None
        self._dispatch, self._answer = dispatch, answer
        self._deterministic, self._seeds = deterministic, seeds
        self._health_checks = health_checks
        self._wait_limit, self._clock = wait_limit, clock
        self._later = later or (lambda seconds, call: None)
        self._lost_lives = lost_lives or (lambda lost, live: None)
        self._looking = False
        self._metrics = Sheet("front-end")
        self._metrics.add("requests_moved", 0)

    # From the front end to the schedulers.

    def send(self, message: Any) -> None:
        kind = type(message).__name__
        if kind.startswith("BatchTokenized"):
            for each in message:
                self._accept(each)
            self._send_what_waits()
        elif kind.startswith("Tokenized"):
            self._accept(message)
            self._send_what_waits()
        elif kind == "AbortReq":
            self._abort(message)
        else:
            self._dispatch(message)

    def _accept(self, message: Any) -> None:
        if message.rid.startswith(self._health_checks):
            self._send_check(message)
            return
        self.ledger.accept(ledger_adapter.request_of(message, self._deterministic), self._clock())
        self._kept[message.rid] = ledger_adapter.kept_copy(message, self._seeds)

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

    def _send_what_waits(self) -> None:
        if self._check is not None:
            self._send_check(self._check)
        for request_id in self.ledger.waiting():
            kept, replay = self._kept[request_id], self.ledger.replay_of(request_id)
            rank = self._rank_for(kept)
            if rank is None:
                break
            if replay.inexact:
                logger.warning("request %s may go on differently on rank %d: %s", request_id, rank, replay.inexact)
            self.ledger.assigned(request_id, rank, self.live[rank])
            self._dispatch(ledger_adapter.message_for(kept, replay, rank))
        self._look_later()

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

    def _replay(self, lost: Lost) -> None:
        for request_id in lost.aborted:
            self._end(request_id, None)
        for request_id in lost.complete:
            self._end(request_id, {"type": "length", "length": self._kept[request_id].sampling_params.max_new_tokens})
        for request_id, why in lost.failed:
            self._end(request_id, _try_again(f"the rank that served this request was lost, and {why}"))
        if lost.replays:
            self._metrics.add("requests_moved", len(lost.replays))
            logger.info("replaying %d requests on %s", len(lost.replays), sorted(self.live) or "whoever comes back")
        self._send_what_waits()

    # What nobody can serve.

    def look(self) -> None:
        """Give up on requests that have waited for too long."""
        self._looking = False
        for request_id in self.ledger.give_up(self._clock(), self._wait_limit):
            self._end(request_id, _try_again(f"no rank came back within {self._wait_limit:g} s to serve this request"))
        self._look_later()

    def _look_later(self) -> None:
        if not self._looking and self.ledger.waiting():
            self._looking = True
            self._later(min(_LOOKS_EVERY, self._wait_limit), self.look)

    def _end(self, request_id: str, finish_reason: dict[str, Any] | None) -> None:
        kept = self._kept.pop(request_id, None)
        self._answer(request_id, finish_reason, len(getattr(kept, "input_ids", None) or ()))


def _try_again(why: str) -> dict[str, Any]:
    return {
        "type": "abort",
        "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
        "err_type": "ServiceUnavailable",
        "message": f"{why}; try again",
    }


# The hooks.


def register() -> None:
    hooks.hook("entrypoints.engine.Engine._launch_subprocesses", _prepare_directory, "before")
    hooks.hook(_MANAGER + "auto_create_handle_loop", _start_watching, "after")
    hooks.hook(_MANAGER + "_dispatch_to_scheduler", _dispatch_to_scheduler)
    hooks.hook(_MANAGER + "_handle_batch_output", _handle_batch_output)
    hooks.hook(_MANAGER + "_handle_abort_req", _handle_abort_req)


def _prepare_directory(*_: Any, **__: Any) -> None:
    """In the process that launches the server, before it has children. The supervisor's keeper removes it, with all that is
    in it. SystemExit if it has something in it already, which may be another server's, or anybody's."""
    wanted = os.environ.get(DIRECTORY)
    if wanted and os.path.isdir(wanted) and os.listdir(wanted):
        raise SystemExit(
            f"{DIRECTORY}={wanted} is not empty: another server may use it, and it is removed when this one ends. Name a "
            "directory that does not exist yet, or none"
        )
    directory = PrivateDirectory.create(Path(wanted) if wanted else None).path
    os.environ[DIRECTORY] = str(directory)
    if options.required().faults:
        allow_in(directory)
    logger.info("eep: the supervisor's directory is %s ('eep status --dir', 'eep events --dir')", directory)


def _front_end_of(manager: Any, dispatch: Callable[[Any, Any], None] | None = None) -> FrontEnd:
    found = getattr(manager, _ATTRIBUTE, None)
    if found is None:
        from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
        from sglang.srt.managers.io_struct import AbortReq

        send = dispatch or type(manager)._dispatch_to_scheduler.__wrapped__
        found = FrontEnd(
            lambda message: send(manager, message),
            lambda rid, reason, prompt: _answer(manager, AbortReq(rid=rid, finished_reason=reason), prompt),
            deterministic=options.required().seeded,
            seeds=Seeds.for_server(manager.server_args),
            health_checks=(HEALTH_CHECK_RID_PREFIX,),
            wait_limit=float(os.environ.get(WAIT_LIMIT, _DEFAULT_WAIT_LIMIT)),
            later=lambda seconds, call: manager.event_loop.call_later(seconds, call),
            lost_lives=partial(questions.expect_answers, manager),
        )
        setattr(manager, _ATTRIBUTE, found)
    return found


def _answer(manager: Any, message: Any, prompt_tokens: int) -> None:
    """As SGLang answers for a request that never ran, and with the counts of one that did: OpenAI's endpoints need them."""
    state = manager.rid_to_state.get(message.rid)
    type(manager)._handle_abort_req.__wrapped__(manager, message)
    if state is not None and state.out_list:
        for name, count in (("prompt_tokens", prompt_tokens), ("cached_tokens", 0)):
            state.out_list[-1]["meta_info"].setdefault(name, count)


def _start_watching(_: None, manager: Any) -> None:
    front_end = _front_end_of(manager)
    if getattr(front_end, "watcher", None) is not None:
        return
    call = manager.event_loop.call_soon_threadsafe

    def on_view(view: View, running: bool) -> None:
        call(_apply_view, manager, front_end, view)

    def on_gone(rank: int, incarnation: int, reason: str) -> None:
        call(front_end.on_gone, rank, incarnation)

    front_end.watcher = Watcher(Path(os.environ[DIRECTORY]), on_view, on_gone)  # type: ignore[attr-defined]
    garbage.leave_out_what_is_there(manager)


def _apply_view(manager: Any, front_end: FrontEnd, view: View) -> None:
    front_end.on_view(view)
    questions.expect_answers(manager, 0, len(front_end.live))


def _dispatch_to_scheduler(original: Callable[[Any, Any], None], manager: Any, message: Any) -> None:
    _front_end_of(manager, original).send(message)


async def _handle_batch_output(original: Callable[[Any, Any], Any], manager: Any, output: Any) -> None:
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    # Output that nobody waits for is an error to SGLang, except that of a health check.
    _front_end_of(manager).output(output, late=f"{HEALTH_CHECK_RID_PREFIX}_late_output")
    await original(manager, output)


def _handle_abort_req(original: Callable[[Any, Any], None], manager: Any, message: Any) -> None:
    if _front_end_of(manager).abort_answer(message):
        original(manager, message)
