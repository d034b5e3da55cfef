"""Questions to every rank (``/server_info``, ``/flush_cache``, ...): SGLang must expect as many answers as will come. And
orders to every rank that are refused, whichever way they come. Over HTTP, :mod:`.route_guard` refuses them and others.

SGLang asks one question of a kind at a time, and waits for a number of answers without a limit of time. If it expects one
answer too many, that kind of question is blocked for ever.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from sglang_patches import hooks
from sglang_patches.front_end import routes

_NO_RANK = "_eep_no_rank_is_in"
_MANAGER = "managers.tokenizer_manager.TokenizerManager."
_CONTROL = "managers.tokenizer_control_mixin.TokenizerControlMixin."


def register() -> None:
    hooks.hook("managers.communicator.FanOutCommunicator.__call__", ask_all_ranks)
    hooks.hook(_MANAGER + "pause_generation", refuse_to_pause)
    hooks.hook(_MANAGER + "update_weights_from_disk", refuse_to_change, "replace")
    hooks.hook(_CONTROL + "update_weights_from_distributed", refuse_to_change, "replace")
    hooks.hook(_CONTROL + "update_weights_from_tensor", refuse_to_change, "replace")
    hooks.hook(_CONTROL + "update_weights_from_ipc", refuse_to_change, "replace")
    hooks.hook(_CONTROL + "begin_weight_update", refuse_to_change, "replace")
    hooks.hook(_CONTROL + "release_memory_occupation", refuse_to_change, "replace")
    hooks.hook(_CONTROL + "resume_memory_occupation", refuse_to_change, "replace")
    hooks.hook(_CONTROL + "check_weights", refuse_to_compare, "replace")


def expect_answers(manager: Any, lost: int, live: int) -> None:
    """``lost`` ranks are gone, and ``live`` are left. A lost rank will not answer, so the caller goes on with the answers of
    the others. The next question goes to those that are left.
    """
    for communicator in _communicators(manager):
        setattr(communicator, _NO_RANK, live == 0)
        communicator.set_fan_out(live)
        if communicator._result_fan_out is not None and communicator._result_event is not None:
            # Before the first view SGLang asks all ranks that there may ever be, which may be more than are in.
            communicator._result_fan_out = min(communicator._result_fan_out - lost, live)
            if len(communicator._result_values) >= communicator._result_fan_out:
                communicator._result_event.set()


def _communicators(manager: Any) -> list[Any]:
    from sglang.srt.managers.communicator import FanOutCommunicator

    return [each for each in vars(manager).values() if isinstance(each, FanOutCommunicator)]


async def ask_all_ranks(original: Callable[[Any, Any], Awaitable[Any]], communicator: Any, question: Any) -> Any:
    """Refuse a question while no rank is in. Ranks that come back later would not answer it: they were not asked."""
    if getattr(communicator, _NO_RANK, False):
        from fastapi import HTTPException

        raise HTTPException(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "no rank is in to answer this: all were lost, and the supervisor relaunches them. Ask again in a while",
        )
    return await original(communicator, question)


async def refuse_to_change(*_: Any, **__: Any) -> None:
    """Orders for other weights, or to release memory. Each rank would obey between two steps of its own choice, and the
    others would wait for it there. A rank that joins later would have the weights of the start, and so would experts that
    repair brings in from the checkpoint or from the backup."""
    from fastapi import HTTPException

    raise HTTPException(HTTPStatus.BAD_REQUEST, routes.CHANGE)


async def refuse_to_compare(*_: Any, **__: Any) -> None:
    """``/weights_checker``. Ranks would exchange sums outside of their steps, each at another moment."""
    from fastapi import HTTPException

    raise HTTPException(HTTPStatus.BAD_REQUEST, routes.COMPARE)


async def refuse_to_pause(original: Callable[[Any, Any], Awaitable[None]], manager: Any, obj: Any) -> None:
    """``/pause_generation``. With mode ``abort`` only the front end holds requests back, and the ranks go on with empty
    steps. With the other modes each scheduler stops at a step of its own, and a joiner does not know of it."""
    if obj.mode != "abort":
        from fastapi import HTTPException

        raise HTTPException(
            HTTPStatus.BAD_REQUEST,
            f"mode {obj.mode!r} does not go together with --ep-backend eep: a paused rank takes part in no step, and its "
            "peers would take it for lost. Use mode 'abort', which ends the requests under way and holds new ones back until "
            "/continue_generation",
        )
    await original(manager, obj)
