"""A process beside the ranks of a server that is started again whenever it ends, until the server does."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from eep.control.launch.processes import describe_exit
from eep.control.private_directory import CONTROL_DIRECTORY

logger = logging.getLogger(__name__)

_LOOKS_EVERY = 0.2
_FIRST_WAIT, _LONGEST_WAIT, _LIVED_WELL = 0.5, 60.0, 60.0
_ENDS_WITHIN = 5.0


class KeptProcess:
    """``name`` is what the log calls it. ``command()``: what to run; None: not yet. It belongs to no rank; if this process
    cannot end it, the keeper of ``directory`` does. ``ends_for_good``: with status 0 it has nothing to do here."""

    def __init__(
        self, name: str, directory: Path, command: Callable[[], Sequence[str] | None], *, ends_for_good: bool = False
    ) -> None:
        self._name, self._directory, self._command = name, directory, command
        self._ends_for_good = ends_for_good
        self._lock = threading.Lock()
        self._is_ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._thread = threading.Thread(target=self._run, name=f"eep-{name.replace(' ', '-')}", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, int | None]:
        """For operators: ``pid``, None while it does not run, and how often it was started. From any thread."""
        process = self._process
        runs = process is not None and process.returncode is None
        return {"pid": process.pid if process is not None and runs else None, "starts": self._starts}

    def stop(self) -> None:
        """End it. A second call does nothing."""
        with self._lock:
            self._is_ending.set()
            if self._process is not None:
                self._process.terminate()
        self._thread.join(_ENDS_WITHIN)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join(_ENDS_WITHIN)

    def _run(self) -> None:
        wait = _FIRST_WAIT
        while not self._is_ending.is_set():
            command = self._command()
            if command is None:
                self._is_ending.wait(_LOOKS_EVERY)
                continue
            began = time.monotonic()
            process = self._spawn(command)
            if process is None:
                return
            code = process.wait()
            if self._is_ending.is_set() or (code == 0 and self._ends_for_good):
                return
            wait = _FIRST_WAIT if time.monotonic() - began > _LIVED_WELL else min(2 * wait, _LONGEST_WAIT)
            logger.warning(
                "eep: the %s process has ended (%s); the controller starts another in %g s",
                self._name,
                describe_exit(code),
                wait,
            )
            self._is_ending.wait(wait)

    def _spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """None if :meth:`stop` was called meanwhile."""
        with self._lock:
            if self._is_ending.is_set():
                return None
            self._process = subprocess.Popen(
                command,
                # By this variable the keeper finds the processes that it must end.
                env={**os.environ, CONTROL_DIRECTORY: str(self._directory)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._starts += 1
        logger.info("eep: the %s starts, process %d", self._name, self._process.pid)
        return self._process
