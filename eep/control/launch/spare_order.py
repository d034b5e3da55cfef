"""The order by which a spare learns which rank it is: one message over a socket that it was born with.

What prepares a spare may wait for the order itself (:func:`await_order`), when it has gone as far as it can. It is the rank
from then on.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

MAX_ORDER = 1 << 17
READY = b"ready"
SPARE_FOR = "EEP_SPARE_FOR"
"""The environment variable that names a rank to what prepares a spare; unless that binds it, it may become another."""
NO_ORDER = os.EX_NOINPUT
"""The exit status of a process that was never told which rank it is."""
_PARENT_DEATH_SIGNAL = 1

_socket: socket.socket | None = None
_was_taken = False


def expect(descriptor: int) -> None:
    """The order will come over this socket. Until then this process ends with the thread that started it."""
    global _socket
    _socket = socket.socket(fileno=descriptor)
    _on_parent_death(signal.SIGKILL)


def has_come() -> bool:
    """Whether it is there, or will never come."""
    return _socket is not None and bool(select.select([_socket], [], [], 0)[0])


def was_taken() -> bool:
    """Whether this process knows which rank it is."""
    return _was_taken


def await_order() -> dict[str, Any]:
    """Say that this process is ready, wait for the order, and take over the environment of the rank. SystemExit if the
    launcher has gone."""
    global _was_taken
    assert _socket is not None, "this process is no spare, or has its order"
    order = _receive(_socket)
    _socket.close()
    if order is None:
        sys.exit(NO_ORDER)
    _was_taken = True
    _on_parent_death(0)  # a rank ends when its supervisor's keeper says so
    os.environ.pop(SPARE_FOR, None)
    os.environ.update(order["environment"])
    return order


def _receive(sock: socket.socket) -> dict[str, Any] | None:
    with suppress(ConnectionError):  # a launcher that has sent the order no longer listens
        sock.send(READY)
    try:
        data = sock.recv(MAX_ORDER)
    except ConnectionError:  # the launcher closed before it read that we are ready, and sent no order
        return None
    order: dict[str, Any] | None = json.loads(data) if data else None
    return order


def _on_parent_death(number: int) -> None:
    """Have the kernel send this signal when the thread that started us is gone; 0 for none."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number)
