"""What a rank sends when the detokenizer ends and another takes its place: real sockets, real processes, real SIGKILL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_patches.addressed_life import RENEWED, REVOKED
from sglang_patches.rank import detokenizer_link

zmq: Any = pytest.importorskip("zmq")

RECEIVER = """
import sys, zmq
socket = zmq.Context().socket(zmq.PULL)
socket.bind(sys.argv[1])
print("listens", flush=True)
while True:
    print(socket.recv().decode(), flush=True)
"""


def receiver(address: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", RECEIVER, address], stdout=subprocess.PIPE, text=True)
    assert lines(process, 1) == ["listens"]
    return process


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(count)]


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_the_next_one_gets_what_is_sent_after_the_order_and_nothing_from_before(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(address)
    scheduler = SimpleNamespace(ipc_channels=SimpleNamespace(send_to_detokenizer=SimpleNamespace(socket=socket)))
    try:
        for life in range(3):
            process = receiver(address)
            try:
                if life:
                    assert lines(process, 20) == [f"{life} {each}" for each in range(20)]
                socket.send(b"to this one")
                assert lines(process, 1) == ["to this one"]
            finally:
                end(process)
            for each in range(20):
                socket.send(f"late {each}".encode())
            detokenizer_link._before_requests(scheduler, [SimpleNamespace(abort_message=RENEWED)])
            for each in range(20):
                socket.send(f"{life + 1} {each}".encode())
    finally:
        context.destroy(linger=0)


def test_the_order_goes_before_the_requests_that_came_with_it() -> None:
    """SGLang sorts what came together: requests first. Of several orders one will do."""
    messages = [SimpleNamespace(rid="a~2"), SimpleNamespace(rid="1", abort_message=RENEWED)]
    messages += [SimpleNamespace(rid="b"), SimpleNamespace(rid="2", abort_message=RENEWED)]
    assert detokenizer_link.put_renewal_first(messages)
    assert [message.rid for message in messages] == ["2", "a~2", "b"]


def test_other_messages_leave_the_connection_alone() -> None:
    scheduler = SimpleNamespace()  # it has no sockets: a look at them would raise
    detokenizer_link._before_requests(scheduler, None)
    detokenizer_link._before_requests(scheduler, [SimpleNamespace(abort_message=REVOKED), SimpleNamespace(rid="a")])
