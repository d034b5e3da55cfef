"""A process that has imported everything a rank needs, and forks ranks from itself when it is asked to.

``python -m eep.control.launch.fork_server DESCRIPTOR MODULE...`` speaks over one end of a socket pair that it was born
with: no other process can reach it. Messages are JSON, one to a packet:

    (first)                                                  -> {"ready": [modules that could not be imported, why]}
    {"fork": "module:function", "arguments": {...}, "environment": {...}}
                                                             -> {"pid": n}, with the pidfd, or {"error": "..."}
    the same with a descriptor: the function also gets ``descriptor``, the number that it has in the child
    {"copy": true}                                           -> the same, and with a socket to a copy of this process
    {"reap": pid}                                            -> {"code": n}, or {"code": null} if it was not ours

A child is told the name of what to run; nothing is unpickled. It gets a session of its own and leaves this file for
good. A child that has ended is reaped only when its exit code is asked for, so that its number is not reused before
its supervisor knows. This process has one thread and holds no device and no lock. It ends when its socket closes, and
its children live on. :func:`fork_here` forks one from a process that has imported everything already.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

MAX_MESSAGE = 1 << 17


@dataclass
class ForkServerProcess:
    """A fork server that is a child of this process. ``environment`` is the one it was born with."""

    pid: int
    socket: socket.socket
    environment: dict[str, str]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


class Closable(Protocol):
    def close(self) -> None: ...


def fork_here(close: Iterable[Closable] = ()) -> ForkServerProcess:
    """Fork this process, which must have one thread, into a fork server. The fork closes what is in ``close``.

    This function returns in this process only. In the fork server and in its children it raises SystemExit, or what a
    child raises: the caller must let that pass.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush()
    sys.stderr.flush()
    environment = dict(os.environ)
    pid = os.fork()
    if pid != 0:
        theirs.close()
        return ForkServerProcess(pid, ours, environment)
    ours.close()
    for each in close:
        each.close()
    os.setsid()
    main(theirs.detach(), [])
    raise SystemExit(0)


def serve_forks(sock: socket.socket, modules: list[str]) -> Callable[[], object] | None:
    """Returns None when the socket ends, and in a child, at once, with what it is to run."""
    failed = []
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # the rank itself will say it better
            failed.append(f"{module}: {type(error).__name__}: {error}")
    gc.collect()
    gc.freeze()  # a child that visited these objects in a collection would copy every page
    _send(sock, {"ready": failed})
    while True:
        data, descriptors, _, _ = socket.recv_fds(sock, MAX_MESSAGE, 1)
        if not data:
            return None
        request = json.loads(data)
        if "reap" in request:
            _send(sock, {"code": _reap(int(request["reap"]))})
            continue
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) if "copy" in request else ()
        try:
            pid = os.fork()
        except OSError as error:
            _send(sock, {"error": f"cannot fork: {error}"})
            pid = None
        if pid == 0:
            sock.close()
            if not ends:
                return _rank(request, descriptors)
            ends[0].close()
            sock = ends[1]
            os.setsid()
            _send(sock, {"ready": []})
            continue
        if pid is not None:
            pidfd = os.pidfd_open(pid)
            given = [pidfd, *(each.fileno() for each in ends[:1])]
            socket.send_fds(sock, [json.dumps({"pid": pid}).encode()], given)
            os.close(pidfd)
        for each in ends:
            each.close()
        for descriptor in descriptors:
            os.close(descriptor)


def _rank(request: dict[str, Any], descriptors: list[int]) -> Callable[[], object]:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    os.environ.update(request["environment"])

    def run() -> object:
        from eep.control.launch.entry_point import find

        given = {"descriptor": descriptors[0]} if descriptors else {}
        return find(request["fork"])(**request["arguments"], **given)

    return run


def _reap(pid: int) -> int | None:
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status)


def _send(sock: socket.socket, message: dict[str, Any]) -> None:
    sock.send(json.dumps(message).encode())


def main(descriptor: int, modules: list[str]) -> None:
    # A rank may signal its parent when it fails; that must not reach the other ranks.
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    try:
        run = serve_forks(socket.socket(fileno=descriptor), modules)
    except ConnectionError:
        return  # the supervisor has ended
    if run is not None:
        run()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
