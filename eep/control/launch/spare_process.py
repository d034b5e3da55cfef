"""A process that has imported what a rank needs, and waits to be told which rank it is.

``python -m eep.control.launch.spare_process DESCRIPTOR WARM MODULE...`` speaks over one end of a socket pair that it was born
with: no other process can reach it. It imports the modules, calls the function ``WARM`` ("module:function"; empty for none),
and says that it is ready. Then it waits for one message, a JSON object in one packet:

    {"run": "module:function", "arguments": {...}, "environment": {...}}

and becomes that rank: the same process, in the session that it has led from the beginning. It follows an early order
before it imports the next module. A process that finds its order when it starts prepares nothing, like one that was
started for the rank. Until it has its order it ends with the process that started it.

Exit status 0 means a rank that is done. A process that ends before it has its order never ends with 0, since it may have
been taken for a rank by then.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from eep.control.launch.entry_point import find

ENTRY = "eep.control.launch.spare_process:main"
MAX_ORDER = 1 << 17
READY = b"ready"
SPARE_FOR = "EEP_SPARE_FOR"
"""The environment variable that tells ``WARM`` for which rank to prepare; it may yet become another."""
NO_ORDER = os.EX_NOINPUT
"""The exit status of a process that was never told which rank it is."""
_PARENT_DEATH_SIGNAL = 1


def wait_for_order(sock: socket.socket, warm: str, modules: list[str]) -> dict[str, Any] | None:
    """Prepare, and wait for the order. None if the launcher has gone."""
    for module in modules:
        if not _has_news(sock):
            importlib.import_module(module)
    if warm and not _has_news(sock):
        find(warm)()
    if not _has_news(sock):
        gc.collect()
        gc.freeze()  # what is there by now stays: the collections of the rank need not visit it
    with suppress(ConnectionError):  # a launcher that has sent the order no longer listens
        sock.send(READY)
    try:
        data = sock.recv(MAX_ORDER)
    except ConnectionError:  # the launcher closed before it read that we are ready, and sent no order
        return None
    return json.loads(data) if data else None


def _has_news(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


def _on_parent_death(number: int) -> None:
    """Have the kernel send this signal when the thread that started us is gone; 0 for none."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number)


def main(descriptor: int, warm: str, modules: list[str]) -> None:
    _on_parent_death(signal.SIGKILL)
    with socket.socket(fileno=descriptor) as sock:
        try:
            order = wait_for_order(sock, warm, modules)
        except SystemExit as ended:  # raised by what it imported or called
            sys.exit(ended.code or NO_ORDER)
    if order is None:
        sys.exit(NO_ORDER)
    _on_parent_death(0)  # a rank ends when its supervisor's keeper says so
    os.environ.pop(SPARE_FOR, None)
    os.environ.update(order["environment"])
    find(order["run"])(**order["arguments"])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
