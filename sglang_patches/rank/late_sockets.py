"""A spare listens to nothing while another process is its rank: messages would be dealt out to both. And a later life takes
requests only when it has its caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

from sglang_patches import hooks
from sglang_patches.rank import next_life

_RECEIVING = (zmq.PULL, zmq.DEALER)


class LateSocket(zmq.Socket[bytes]):
    """Connects when this life of its rank may take requests."""

    def connect(self, addr: str) -> Any:
        def take() -> None:
            super(LateSocket, self).connect(addr)

        next_life.when_free(take)


class _LateContext:
    """A context as SGLang uses it to make one socket."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._context = context

    def socket(self, kind: int) -> LateSocket:
        made: LateSocket = self._context.socket(kind, socket_class=LateSocket)
        return made


def register() -> None:
    hooks.hook("managers.scheduler_components.ipc_channels.get_zmq_socket", _make)


def _make(original: Callable[..., Any], context: Any, kind: int, *arguments: Any, **named: Any) -> Any:
    late = next_life.is_later() and kind in _RECEIVING
    return original(_LateContext(context) if late else context, kind, *arguments, **named)
