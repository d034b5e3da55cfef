"""The processes of a real server on a CPU, by what they do. Those that are forked are told apart by their parents."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from eep.access import peer_credentials
from eep.control.private_directory import PrivateDirectory
from eep.drill.faults import Target
from eep.drill.sglang_server import Server
from tests.sglang.drills import wait_for

MAIN, CONTROLLER, DETOKENIZER, KEEPER = "main", "controller", "detokenizer", "keeper"
FORK_SERVER, RANK_FORK_SERVER, TRACKER = "fork server", "fork server of the ranks", "resource tracker"
_COMMANDS = {TRACKER: "resource_tracker", KEEPER: "supervisor/keeper.py"}


def process_of(server: Server, kind: str) -> int | None:
    """None while one is being replaced."""
    if kind == MAIN:
        return server._process.pid
    if kind in _COMMANDS:
        return _only([pid for pid in server.processes() if _COMMANDS[kind] in _command(pid)])
    controller = _controller(server)
    if kind == CONTROLLER:
        return controller
    fork_server = _parent(controller)
    if kind == FORK_SERVER:
        return fork_server
    if kind == DETOKENIZER:
        return _only([pid for pid in server.processes() if _parent(pid) == fork_server and pid != controller])
    assert kind == RANK_FORK_SERVER
    assert server.directory is not None
    return Target(server.directory).fork_servers()[0]


def kill(server: Server, kind: str) -> int:
    """SIGKILL to the process of that kind. The number that it had."""
    pid = process_of(server, kind)
    assert pid is not None, f"the server has no {kind}"
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_for_next(server: Server, kind: str, killed: int) -> int:
    """Until another process is of that kind."""
    found: list[int] = []

    def is_replaced() -> bool:
        pid = process_of(server, kind)
        found[:] = [pid] if pid is not None and pid != killed else []
        return bool(found)

    wait_for(is_replaced, f"another {kind}")
    return found[0]


def _controller(server: Server) -> int:
    """The process in which the supervisor listens."""
    assert server.directory is not None
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(PrivateDirectory(server.directory).socket))
        return peer_credentials(client).pid


def _only(pids: list[int]) -> int | None:
    assert len(pids) < 2, f"there are several: {pids}"
    return pids[0] if pids else None


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace("\0", " ")


def _parent(pid: int) -> int:
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else 0


def _read(pid: int, what: str) -> str:
    try:
        return Path("/proc", str(pid), what).read_text(errors="replace")
    except OSError:
        return ""  # it has ended
