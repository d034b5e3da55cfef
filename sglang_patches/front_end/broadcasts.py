"""Questions that every rank is asked (``/server_info``, ``/flush_cache``, ...): as many answers are expected as come. And the
orders to all ranks that are refused.

SGLang asks one question of a kind at a time, and waits for a number of answers without a limit of time. One answer too many
that is expected therefore blocks its kind for ever.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from sglang_patches import hooks

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
    """``lost`` ranks that were in are gone, and ``live`` are left. A rank that was asked something and is gone will not
    answer: whoever asked goes on with the answers of the others. What is asked next is asked of those that are left.
    """
    for communicator in _communicators(manager):
        setattr(communicator, _NO_RANK, live == 0)
        communicator.set_fan_out(live)
        if communicator._result_fan_out is not None and communicator._result_event is not None:
            # More than are in, when it was asked before the first view: SGLang begins with all ranks that there may be.
            communicator._result_fan_out = min(communicator._result_fan_out - lost, live)
            if len(communicator._result_values) >= communicator._result_fan_out:
                communicator._result_event.set()


def _communicators(manager: Any) -> list[Any]:
    from sglang.srt.managers.communicator import FanOutCommunicator

    return [each for each in vars(manager).values() if isinstance(each, FanOutCommunicator)]


async def ask_all_ranks(original: Callable[[Any, Any], Awaitable[Any]], communicator: Any, question: Any) -> Any:
    """Nobody would answer while nobody is in, not even when ranks are back: they were not asked."""
    if getattr(communicator, _NO_RANK, False):
        from fastapi import HTTPException

        raise HTTPException(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "no rank is in to answer this; they are being started again. Ask again in a while",
        )
    return await original(communicator, question)


async def refuse_to_change(*_: Any, **__: Any) -> None:
    """Other weights, or memory that is given up for a while. Each rank would do so at a step of its own, and meet the others
    there, who are at another. One that comes later would have the weights of the start, and so would experts that are
    brought in from the checkpoint or from the backup."""
    from fastapi import HTTPException

    raise HTTPException(
        HTTPStatus.BAD_REQUEST,
        "weights cannot be changed, nor memory released, with --ep-backend eep: a rank that comes back would have those of "
        "the start. Start another server with the new weights",
    )


async def refuse_to_compare(*_: Any, **__: Any) -> None:
    """``/weights_checker``. Ranks compare sums with each other, each at a step of its own, where it meets others."""
    from fastapi import HTTPException

    raise HTTPException(
        HTTPStatus.BAD_REQUEST,
        "weights cannot be compared with --ep-backend eep: ranks hold different experts, and would talk outside of steps",
    )


async def refuse_to_pause(original: Callable[[Any, Any], Awaitable[None]], manager: Any, obj: Any) -> None:
    """``/pause_generation``. With mode ``abort`` the front end alone holds requests back, and the ranks go on with empty
    steps. With the others each scheduler stops by itself, at a step of its own, and one that joins does not know of it."""
    if obj.mode != "abort":
        from fastapi import HTTPException

        raise HTTPException(
            HTTPStatus.BAD_REQUEST,
            f"mode {obj.mode!r} cannot be had with --ep-backend eep: a paused rank takes part in no step, and the others "
            "would take it for lost. Use mode 'abort', which ends the requests under way and holds new ones back until "
            "/continue_generation",
        )
    await original(manager, obj)
