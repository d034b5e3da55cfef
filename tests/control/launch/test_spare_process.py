"""How a spare process ends that never heard which rank it is: in no way that could be the end of a rank."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eep.control.launch.spare_order import MAX_ORDER, NO_ORDER, READY
from tests.control.harness import PATIENCE, ROOT


def exit_status(warm: str, then: Callable[[socket.socket], object]) -> tuple[int, bytes]:
    """What a spare ends with, and what it wrote. ``then`` is called once it has said something; then its socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "eep.control.launch.spare_process", str(theirs.fileno()), warm],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                pass_fds=[theirs.fileno()],
                stderr=subprocess.PIPE,
            )
        assert select.select([ours], [], [], PATIENCE)[0]
        then(ours)
    try:
        written = process.communicate(timeout=PATIENCE)[1]
        return process.returncode, written
    finally:
        process.kill()
        process.wait()


def test_a_rank_does_not_collect_what_its_spare_has_imported(tmp_path: Path) -> None:
    """To visit all of it takes half a second, at the worst moment."""
    told = tmp_path / "told"
    order = {"run": "tests.control.ranks:tells_what_collections_leave_out", "arguments": {"path": str(told)}}

    def send_order(sock: socket.socket) -> None:
        reads_that_it_is_ready(sock)
        sock.send(json.dumps({**order, "environment": {}}).encode())

    assert exit_status("", send_order) == (0, b"")
    assert int(told.read_text()) > 1000


def reads_that_it_is_ready(sock: socket.socket) -> None:
    assert sock.recv(MAX_ORDER) == READY


def reads_nothing(sock: socket.socket) -> None:
    pass


@pytest.mark.parametrize("then", [reads_that_it_is_ready, reads_nothing])
def test_a_spare_without_an_order_does_not_end_cleanly_and_complains_of_nothing(
    then: Callable[[socket.socket], object],
) -> None:
    assert exit_status("", then) == (NO_ORDER, b"")
    assert NO_ORDER != 0


def test_a_preparation_that_exits_is_not_the_end_of_a_rank() -> None:
    assert exit_status("sys:exit", reads_nothing) == (NO_ORDER, b"")


def test_a_preparation_that_cannot_connect_says_so() -> None:
    status, written = exit_status("tests.control.ranks:cannot_connect", reads_nothing)
    assert status == 1
    assert b"ConnectionRefusedError" in written


def test_what_prepares_a_spare_may_be_the_rank_itself(tmp_path: Path) -> None:
    """It waits for the order where it has gone as far as it can, and nothing else is run."""
    told = tmp_path / "told"

    def send_order(sock: socket.socket) -> None:
        reads_that_it_is_ready(sock)
        assert not told.exists()
        environment = {"EEP_TEST_TOLD": str(told)}
        order = {"run": "tests.control.ranks:crash_at_start", "arguments": {}, "environment": environment}
        sock.send(json.dumps(order).encode())

    assert exit_status("tests.control.ranks:waits_for_its_order", send_order) == (0, b"")
    assert told.read_text() == "it was its own"
    assert exit_status("tests.control.ranks:waits_for_its_order", reads_that_it_is_ready)[0] == NO_ORDER
