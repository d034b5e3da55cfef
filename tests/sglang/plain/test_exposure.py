"""Who can reach a running server: clients by HTTP, and no other user by anything else."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from eep.drill.sglang_server import Server

pytestmark = pytest.mark.timeout(900)

_LISTENS = "0A"
_ACCEPTS = 0x10000
_NOBODY = 65534
_CONNECT = """
import errno, os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
for path in sys.argv[2:]:
    with socket.socket(socket.AF_UNIX) as client:
        print(errno.errorcode.get(client.connect_ex(path), "connected"), flush=True)
"""


def sockets_of(server: Server) -> set[str]:
    """The inodes of all sockets that its processes have open."""
    found = set()
    for pid in server.processes():
        with suppress(OSError):  # it has ended meanwhile
            for each in os.listdir(f"/proc/{pid}/fd"):
                with suppress(FileNotFoundError):  # it was closed meanwhile
                    link = os.readlink(f"/proc/{pid}/fd/{each}")
                    found.update([link[len("socket:[") : -1]] if link.startswith("socket:[") else [])
    return found


def tcp_ports_of(server: Server) -> set[int]:
    """The TCP ports on which its processes listen."""
    mine = sockets_of(server)
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == _LISTENS and line[9] in mine}


def unix_sockets_of(server: Server) -> set[str]:
    """The paths at which its processes listen. A path that begins with @ is open to every process of the host."""
    mine = sockets_of(server)
    lines = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {line[7] for line in lines if int(line[3], 16) & _ACCEPTS and line[6] in mine}


def test_the_only_tcp_port_is_that_of_http(plain: Server) -> None:
    assert plain.generate("who listens?", tokens=4)
    assert tcp_ports_of(plain) == {plain.port}


def test_the_processes_talk_over_sockets_in_the_private_directory(plain: Server) -> None:
    assert plain.directory is not None
    place = plain.directory / "sockets"
    assert [stat.S_IMODE(each.stat().st_mode) for each in (plain.directory, place)] == [0o700, 0o700]
    names = {Path(path).name for path in unix_sockets_of(plain) if Path(path).parent == place}
    assert names >= {"tokenizer", "detokenizer", "controller", *(f"rank-{rank}" for rank in range(4))}


def test_another_user_cannot_connect_to_any_socket(plain: Server) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    paths = sorted(unix_sockets_of(plain))
    assert paths
    assert [path for path in paths if path.startswith("@")] == []
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(next(path for path in paths if path.endswith("sockets/tokenizer")))  # its own user can
    tried = subprocess.run(
        [sys.executable, "-c", _CONNECT, str(_NOBODY), *paths], capture_output=True, text=True, timeout=60, check=False
    )
    assert tried.returncode == 0, tried.stderr
    answers = dict(zip(paths, tried.stdout.split(), strict=True))
    assert {path: answer for path, answer in answers.items() if answer != "EACCES"} == {}
