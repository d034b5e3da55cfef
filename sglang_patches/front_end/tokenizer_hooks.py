"""Where the front end stands in SGLang: at the two sockets of its TokenizerManager, which stays as it is.

A watcher tells the front end which ranks are in. It listens to the supervisor, which runs in the controller.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from eep.access import TEMPORARY_PREFIX, temporary_base
from eep.control.private_directory import PrivateDirectory
from eep.control.watcher import Watcher
from eep.faults.orders import allow_in
from eep.requests.rank_loads import Measure
from eep.view import View
from sglang_patches import garbage_collector, hooks, options
from sglang_patches.front_end import broadcasts
from sglang_patches.front_end.gauges import ServerGauges
from sglang_patches.front_end.rank_orders import RankOrders
from sglang_patches.front_end.replay import DEFAULT_WAIT_LIMIT, FrontEnd
from sglang_patches.front_end.request_limits import RequestLimits
from sglang_patches.front_end.sampling_fields import check_fields
from sglang_patches.front_end.service_state import ServiceState
from sglang_patches.options import DIRECTORY
from sglang_patches.sampling.seeds import Seeds
from sglang_patches.server import detokenizer, host_flags, private_sockets, resignation

logger = logging.getLogger(__name__)

WAIT_LIMIT = "EEP_WAIT_LIMIT_S"
_MANAGER = "managers.tokenizer_manager.TokenizerManager."
_ATTRIBUTE = "_eep_front_end"


def register() -> None:
    hooks.hook("entrypoints.engine.Engine._launch_subprocesses", _prepare_directory, "before")
    hooks.hook(_MANAGER + "auto_create_handle_loop", _start_watching, "after")
    hooks.hook(_MANAGER + "generate_request", _generate_request)
    hooks.hook(_MANAGER + "_dispatch_to_scheduler", _dispatch_to_scheduler)
    hooks.hook(_MANAGER + "_handle_batch_output", _handle_batch_output)
    hooks.hook(_MANAGER + "_handle_abort_req", _handle_abort_req)


def _prepare_directory(*_: Any, **__: Any) -> None:
    """Make the server's directory, in the process that launches it, before that has children. The supervisor's keeper
    removes the directory with all that is in it. So SystemExit if it has files already: they may be another server's."""
    wanted = os.environ.get(DIRECTORY)
    if wanted and os.path.isdir(wanted) and os.listdir(wanted):
        raise SystemExit(
            f"{DIRECTORY}={wanted} is not empty: another server may use it, and this server would remove it at its end. Name "
            "a directory that does not exist yet, or unset the variable"
        )
    place = Path(wanted) if wanted else temporary_base() / f"{TEMPORARY_PREFIX}{'x' * 8}"
    try:
        private_sockets.check_paths(place, options.required().max_ranks)
    except ValueError as error:
        raise SystemExit(f"{DIRECTORY} cannot be used: {error}") from None
    host = options.required().host
    key = None if host is None else host_flags.read_key(host.key_file)
    directory = PrivateDirectory.create(Path(wanted) if wanted else None, key).path
    private_sockets.prepare(directory)
    os.environ[DIRECTORY] = str(directory)
    if options.required().faults:
        allow_in(directory)
    logger.info("eep: the supervisor's directory is %s ('eep status', 'eep events')", directory)


def _front_end_of(manager: Any, dispatch: Callable[[Any, Any], None] | None = None) -> FrontEnd:
    found = getattr(manager, _ATTRIBUTE, None)
    if found is None:
        from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
        from sglang.srt.managers.io_struct import AbortReq

        send = dispatch or type(manager)._dispatch_to_scheduler.__wrapped__
        found = FrontEnd(
            lambda message: send(manager, message),
            lambda rid, reason, prompt: _answer(manager, AbortReq(rid=rid, finished_reason=reason), prompt),
            RankOrders.through(partial(send, manager)),
            deterministic=options.required().seeded,
            seeds=Seeds.for_server(manager.server_args),
            limits=_limits_of(manager),
            most_open=options.required().most_open,
            measure=_measure_of(manager),
            health_checks=(HEALTH_CHECK_RID_PREFIX,),
            wait_limit=wait_limit(),
            later=lambda seconds, call: manager.event_loop.call_later(seconds, call),
            lost_lives=partial(broadcasts.expect_answers, manager),
            leave_limit=options.drain_limit(),
            service=ServiceState(options.required().least_to_serve),
        )
        setattr(manager, _ATTRIBUTE, found)
    return found


def wait_limit() -> float:
    """How many seconds requests wait while no rank can serve them."""
    return float(os.environ.get(WAIT_LIMIT, DEFAULT_WAIT_LIMIT))


def front_end_of(manager: Any) -> FrontEnd | None:
    """The front end of a TokenizerManager; None before its first request."""
    found: FrontEnd | None = getattr(manager, _ATTRIBUTE, None)
    return found


def _measure_of(manager: Any) -> Measure:
    """The controller would go by this, but only the front end knows which ranks are in."""
    method = str(getattr(manager.server_args, "load_balance_method", "")).lower()
    return Measure.TOKENS if method == "total_tokens" else Measure.REQUESTS


def _limits_of(manager: Any) -> RequestLimits:
    model = manager.model_config
    return RequestLimits(model.vocab_size, model.hidden_size, manager.context_len)


def _answer(manager: Any, message: Any, prompt_tokens: int) -> None:
    """Answer as SGLang does for a request that never ran, but with counts of tokens: OpenAI's endpoints need them."""
    state = manager.rid_to_state.get(message.rid)
    type(manager)._handle_abort_req.__wrapped__(manager, message)
    if state is None or not state.out_list:
        return
    last = state.out_list[-1]
    for name, count in (("prompt_tokens", prompt_tokens), ("cached_tokens", 0)):
        last["meta_info"].setdefault(name, count)
    if last.get("output_ids") and len(last["output_ids"]) < last["meta_info"].get("completion_tokens", 0):
        # A stream of pieces. SGLang repeats the last token and all of the text, which the client has.
        last["output_ids"], last["text"] = [], ""


def _start_watching(_: None, manager: Any) -> None:
    front_end = _front_end_of(manager)
    if getattr(front_end, "watcher", None) is not None:
        return
    call, elsewhere = manager.event_loop.call_soon_threadsafe, options.required().remote_ranks

    def on_view(view: View, running: bool) -> None:
        call(_apply_view, manager, front_end, view, running, elsewhere)
        if running:
            gauges.look_soon()

    def on_gone(rank: int, incarnation: int, reason: str, failed: bool) -> None:
        call(_apply_loss, front_end, rank, incarnation, failed)

    directory = Path(os.environ[DIRECTORY])
    ledger = front_end.ledger
    gauges = ServerGauges(
        directory,
        lambda: (len(ledger), ledger.waiting_count),
        masks=options.required().masks,
    )
    front_end.watcher = Watcher(directory, on_view, on_gone)  # type: ignore[attr-defined]
    if (process := detokenizer.current()) is not None:
        give_up = partial(resignation.announce, directory)
        process.watch(manager.event_loop, front_end.on_detokenizer_gone, give_up, options.relaunch_limit())
    garbage_collector.freeze_server(manager)


def _apply_view(
    manager: Any, front_end: FrontEnd, view: View, running: bool, elsewhere: frozenset[int] = frozenset()
) -> None:
    """``elsewhere``: the ranks of other hosts, which get no requests from here."""
    front_end.on_view(replace(view, active=tuple(rank for rank in view.active if rank not in elsewhere)))
    front_end.service.elsewhere = sum(rank in elsewhere for rank in view.active)
    front_end.service.seen(len(front_end.ranks.live), running, time.monotonic(), len(front_end.ranks.serving))
    broadcasts.expect_answers(manager, 0, len(front_end.ranks.live))


def _apply_loss(front_end: FrontEnd, rank: int, incarnation: int, failed: bool) -> None:
    was_in, moved = front_end.ranks.live.get(rank) == incarnation, front_end.ledger.moved
    front_end.on_gone(rank, incarnation, failed)
    if (moved := front_end.ledger.moved - moved) > 0:
        front_end.watcher.say_moved(rank, incarnation, moved)  # type: ignore[attr-defined]
    if was_in:  # a view without it follows, and says that the others run
        front_end.service.seen(len(front_end.ranks.live), False, time.monotonic(), len(front_end.ranks.serving))


def _generate_request(original: Callable[..., Any], manager: Any, obj: Any, *arguments: Any, **named: Any) -> Any:
    """Before SGLang makes a request of each sample. Ranges are checked when there is one message to a request."""
    check_fields(getattr(obj, "sampling_params", None), _fields_of(manager.sampling_params_class))
    answers = original(manager, obj, *arguments, **named)
    return _front_end_of(manager).masked.marking(answers) if options.required().masks else answers


@functools.cache
def _fields_of(parameters: type) -> frozenset[str]:
    return frozenset(inspect.signature(parameters).parameters)


def _dispatch_to_scheduler(original: Callable[[Any, Any], None], manager: Any, message: Any) -> None:
    _front_end_of(manager, original).send(message)


async def _handle_batch_output(original: Callable[[Any, Any], Any], manager: Any, output: Any) -> None:
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    # SGLang reports output for an unknown request as an error, except that of a health check.
    _front_end_of(manager).output(output, late=f"{HEALTH_CHECK_RID_PREFIX}_late_output")
    await original(manager, output)


def _handle_abort_req(original: Callable[[Any, Any], None], manager: Any, message: Any) -> None:
    if _front_end_of(manager).abort_answer(message):
        original(manager, message)
