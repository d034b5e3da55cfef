"""In the data-parallel controller: requests go to the ranks that are live, and no send ever waits for a rank."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_patches import garbage_collector, hooks, options
from sglang_patches.addressed_life import is_renewal, life_of
from sglang_patches.options import DIRECTORY
from sglang_patches.server import controller_process, launcher, resignation
from sglang_patches.server.launch_records import LaunchRecorder
from sglang_patches.server.outbox import Outbox
from sglang_patches.server.server_ranks import LiveRanks, ServerRanks

logger = logging.getLogger(__name__)

_CONTROLLER = "managers.data_parallel_controller.DataParallelController."
_ATTRIBUTE = "_eep_ranks"
_PROCESS = launcher.ChildProcess(controller_process.__name__, "run")
_POLLS_EVERY_MS = 50


def register() -> None:
    hooks.rebind("entrypoints.engine.run_data_parallel_controller_process", _PROCESS)
    hooks.hook(_CONTROLLER + "launch_tensor_parallel_group", _launch)
    hooks.hook(_CONTROLLER + "maybe_external_dp_rank_routing", _route, "replace")
    hooks.hook(_CONTROLLER + "event_loop", _event_loop, "replace")


def _launch(original: Callable[..., Any], controller: Any, *arguments: Any, **named: Any) -> Any:
    from sglang.srt.managers import data_parallel_controller as module

    directory, wanted = Path(os.environ[DIRECTORY]), options.required()

    def start(count: int) -> ServerRanks:
        if count != wanted.max_ranks:
            raise RuntimeError(f"SGLang would start {count} schedulers, but there are {wanted.max_ranks} ranks")
        ranks = ServerRanks(directory, wanted)
        setattr(controller, _ATTRIBUTE, ranks)
        return ranks

    real = module.mp
    module.mp = LaunchRecorder(directory, start)
    try:
        result = original(controller, *arguments, **named)
        # SGLang passes their process ids on; those that were not started have none.
        controller.scheduler_procs = [process for process in controller.scheduler_procs if process.pid is not None]
        return result
    finally:
        module.mp = real


def _route(controller: Any, request: Any) -> bool:
    """To the rank that the front end chose, which knows who is in. If it is gone by now, the front end knows that too."""
    from sglang.srt.managers import data_parallel_controller as module

    rank = request.routed_dp_rank
    if rank is None:
        return False
    life, ranks = life_of(request), getattr(controller, _ATTRIBUTE)
    if life is None or not ranks.lives.has_ended(rank, life):  # otherwise its next life would get the request
        module.sock_send(controller.workers[rank], request)
    return True


def outlive_failed_ranks() -> None:
    """A scheduler that fails signals its parent, which is us unless it was forked. It is started again, and we stay."""
    signal.signal(signal.SIGQUIT, lambda *_: logger.warning("a rank has failed; its output above says why"))


def _event_loop(controller: Any) -> None:
    import zmq
    from sglang.srt.managers import data_parallel_controller as module

    ranks: ServerRanks = getattr(controller, _ATTRIBUTE)
    outlive_failed_ranks()
    garbage_collector.freeze_this_process()
    outbox = Outbox(module.sock_send)
    module.sock_send = outbox
    poller = zmq.Poller()
    poller.register(controller.recv_from_tokenizer, zmq.POLLIN)
    has_resigned = False
    while True:
        controller.soft_watchdog.feed()
        if not has_resigned and (why := ranks.why_to_resign()):
            resignation.announce(ranks.directory, why)
            has_resigned = True
        mark_the_dead(controller, ranks.lives, outbox)
        outbox.flush()
        if not poller.poll(_POLLS_EVERY_MS):
            continue
        while True:
            try:
                request = module.sock_recv(controller.recv_from_tokenizer, flags=zmq.NOBLOCK)
            except zmq.Again:
                break
            except Exception as error:
                # The front end checks what it sends; should something get past it, one request is lost and not the server.
                logger.error("the controller dropped a message of the front end that it cannot read: %s", error)
                continue
            mark_the_dead(controller, ranks.lives, outbox)
            if type(request).__name__ == "ShutdownReq":
                # Passed on, it would have every scheduler end on its own, and the supervisor would start it again.
                ranks.stop()
                raise SystemExit(0)  # SGLang would ask after its processes if we returned
            if is_renewal(request):
                send_to_every_rank(controller, request)
                continue
            try:
                controller._request_dispatcher(request)
            except (ValueError, RuntimeError) as error:
                # Sent to a rank that is gone: the front end hears of that as well, and sends it again.
                logger.warning("a request was not dispatched, the front end sends it again: %s", error)


def send_to_every_rank(controller: Any, message: Any) -> None:
    """To those that start, too. SGLang sends to the ranks that are in."""
    from sglang.srt.managers import data_parallel_controller as module

    for socket in controller.workers:
        if socket is not None:
            module.sock_send(socket, message)


def mark_the_dead(controller: Any, ranks: LiveRanks, outbox: Outbox) -> None:
    """Follow every end and every view, before the next request is dispatched."""
    while ranks.ended:
        rank = ranks.ended.popleft()
        if rank < len(controller.workers) and controller.workers[rank] is not None:
            outbox.forget(controller.workers[rank])
    live = ranks.live
    controller.status = [rank in live for rank in range(len(controller.status))]
    controller._active_workers = [rank for rank in range(len(controller.workers)) if rank in live]
    controller._active_count_cache = len(controller._active_workers)
