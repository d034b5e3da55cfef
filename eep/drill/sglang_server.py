"""A real SGLang server on this machine: started in a session of its own, asked over HTTP, and stopped.

Every process of a server carries a mark in its environment, so that a test finds what is left over whatever its parent is.
The server ends with the thread that launched it, also if that is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eep.drill.devices import CPU, Device
from eep.drill.query_answers import new_tokens

START_WITHIN = 280.0
STOP_WITHIN = 60.0
_DERIVED_PORTS = (0, *range(233, 242))
"""SGLang listens on these beside the port that it is given."""
_MARK = "EEP_TEST_SERVER"
_SHARED_MEMORY = Path("/dev/shm")
_SET_PARENT_DEATH_SIGNAL = 1
_LIBC = ctypes.CDLL(None)

ONE_RANK = ("--tp-size", "1")
FOUR_RANKS = ("--tp-size", "4", "--dp-size", "4", "--enable-dp-attention", "--ep-size", "4", "--ep-backend", "eep")


class Server:
    """``with Server(model, FOUR_RANKS, log) as server``: starts, waits until it answers, and stops."""

    def __init__(
        self,
        model: Path,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        device: Device = CPU,
        host: str = "127.0.0.1",
        within: Sequence[str] = (),
    ) -> None:
        """``directory``: where the supervisor is to have its private things, for those who want to ask it. ``host``: where it
        listens. ``within``: a command that runs another one, such as one that enters a network namespace first."""
        self.port = _free_port()
        self.directory = directory
        self._host = host
        self._mark = uuid.uuid4().hex
        self._log = log
        self._mapped: set[Path] = set()
        """The files in shared memory that its processes were seen with."""
        self._has_eep = "--ep-backend" in arguments
        device = device.for_ranks(_most_ranks(arguments))
        self._command = [
            *within,
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)),
            *("--host", host, "--port", str(self.port)),
            *device.flags,
            *arguments,
        ]
        self._environment = {
            **os.environ,
            **device.environment,
            _MARK: self._mark,
            "SPT_NOENV": "1",  # SGLang's processes have titles, which would be written over the mark
            **({} if directory is None else {"EEP_SERVER_DIR": str(directory)}),
            **(environment or {}),
        }

    def launch(self) -> None:
        """Start it, and do not wait until it answers."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def __enter__(self) -> Server:
        self.launch()
        try:
            self.wait_until_it_answers()
        except BaseException:
            self.kill()
            raise
        self._look_for_shared_memory()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            # The log may be in a folder that is about to go.
            print(f"the end of the server's log:\n{self.log[-6000:]}", file=sys.stderr, flush=True)
        self.stop()

    @property
    def pid(self) -> int:
        """The process that serves HTTP."""
        return self._process.pid

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.port}"

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """Ask it to end, as a user would, and kill it if it does not. What SGLang leaves in shared memory without eep is
        removed."""
        self._look_for_shared_memory()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_WITHIN)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server did not end within {STOP_WITHIN} s\n{self.log[-4000:]}") from None
        if not self._has_eep:
            for path in self._mapped:
                path.unlink(missing_ok=True)

    def kill(self) -> None:
        """All of it at once, with the keeper, which would remove its files in shared memory. So they are removed here."""
        self._look_for_shared_memory()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        for path in self._mapped:
            path.unlink(missing_ok=True)

    def processes(self) -> list[int]:
        """Every process of this server that lives."""
        mark = f"{_MARK}={self._mark}".encode()
        return [pid for pid in _pids() if mark in _read(pid, "environ")]

    def leftovers(self, within: float = 60.0) -> list[str]:
        """What is still there of a server that has ended; children may take a moment to follow.

        Other servers on this machine have files in shared memory too, which come and go at any time. So a file counts if a
        process of this server was seen with it: when the server was ready, when it was told to end, and now.
        """
        end = time.monotonic() + within
        while True:
            self._look_for_shared_memory()
            left = [f"process {pid}" for pid in self.processes()] + [
                str(path) for path in self._mapped if path.exists()
            ]
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.1)

    def _look_for_shared_memory(self) -> None:
        self._mapped.update(path for pid in self.processes() for path in shared_memory_of(pid))

    # ---- requests ----

    def generate(self, text: str, tokens: int = 24, **sampling: object) -> list[int]:
        """The tokens of a greedy answer, by SGLang's own endpoint."""
        body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, **sampling}}
        answer = json.loads(b"".join(self._post("/generate", body)))
        return list(answer["output_ids"])

    def generate_stream(self, text: str, tokens: int = 24) -> list[int]:
        body = {"text": text, "stream": True, "sampling_params": {"temperature": 0, "max_new_tokens": tokens}}
        answer: list[int] = []
        for event in self._events("/generate", body):
            answer += new_tokens(event, len(answer))
        return answer

    def complete(self, text: str, tokens: int = 24) -> str:
        """The text of a greedy answer, by the OpenAI endpoint."""
        body = {"model": "default", "prompt": text, "temperature": 0, "max_tokens": tokens}
        answer = json.loads(b"".join(self._post("/v1/completions", body)))
        return str(answer["choices"][0]["text"])

    def complete_stream(self, text: str, tokens: int = 24) -> str:
        body = {"model": "default", "prompt": text, "temperature": 0, "max_tokens": tokens, "stream": True}
        return "".join(
            event["choices"][0]["text"] for event in self._events("/v1/completions", body) if event["choices"]
        )

    def _events(self, path: str, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        for line in self._post(path, body):
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line[6:])

    def _post(self, path: str, body: Mapping[str, object]) -> Iterator[bytes]:
        connection = http.client.HTTPConnection(self._host, self.port, timeout=120)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise AssertionError(f"{path} answered {response.status}: {response.read()[:1000]!r}")
            yield from response
        finally:
            connection.close()

    def wait_until_it_answers(self, within: float = START_WITHIN) -> None:
        """AssertionError, with the end of its log, if it ends before or does not answer for so many seconds."""
        end, last = time.monotonic() + within, ""
        while time.monotonic() < end:
            if (code := self._process.poll()) is not None:
                raise AssertionError(f"the server ended with {code} before it answered\n{self.log[-6000:]}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection(self._host, self.port, timeout=5)
                try:
                    connection.request("GET", "/health")
                    if connection.getresponse().status == 200:
                        return
                finally:
                    connection.close()
            newest = self.log.rstrip().rpartition("\n")[2][:150]
            if newest != last:
                print(f"starting: {newest}", flush=True)
                last = newest
            time.sleep(0.25)
        raise AssertionError(f"the server did not answer within {within:g} s\n{self.log[-6000:]}")


def _free_port() -> int:
    choose = random.Random(os.urandom(8))
    for _ in range(100):
        port = choose.randrange(20000, 30000)
        if all(_is_free(port + offset) for offset in _DERIVED_PORTS):
            return port
    raise AssertionError("no free ports for a server")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, what: str) -> bytes:
    """Of a process that may be gone, or another user's: nothing then."""
    try:
        return Path("/proc", str(pid), what).read_bytes()
    except OSError:
        return b""


def shared_memory_of(pid: int) -> set[Path]:
    """The files in shared memory that a process has mapped."""
    mapped = [line.split(maxsplit=5)[5:] for line in _read(pid, "maps").decode(errors="replace").splitlines()]
    paths = {Path(name) for names in mapped for name in names if not name.endswith(" (deleted)")}
    return {path for path in paths if path.parent == _SHARED_MEMORY}


def _most_ranks(arguments: Sequence[str]) -> int:
    """How many ranks the server may have."""
    given = itertools.pairwise(arguments)
    return max((int(value) for flag, value in given if flag in ("--tp-size", "--eep-max-ranks")), default=1)


def _end_with_parent() -> None:
    """Runs in the child before it becomes the server."""
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
