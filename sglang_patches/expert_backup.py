"""``--eep-backup``: a process beside the supervisor keeps every expert in host memory, and ranks read from it.

The process is ``eep backup serve`` on a registry below the supervisor's private directory. It belongs to no rank. The
controller starts it again when it ends, and ends it with the server; if the controller cannot, the supervisor's keeper does.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eep.control.launch.processes import describe_exit
from eep.control.private_directory import CONTROL_DIRECTORY
from eep.data_plane.memory import Memory
from eep.data_plane.memory.shm import SharedMemory
from eep.errors import EepError
from eep.experts.backup.backup_client import BackupClient
from eep.experts.backup.live_offer import LiveOffer
from eep.experts.backup.transfer_engine import Engine
from eep.experts.layout import ExpertLayout, ExpertMemory
from eep.experts.registry.directory_registry import DirectoryRegistry
from sglang_patches import recipe

logger = logging.getLogger(__name__)

_NAME = "host"
_ALL_THAT_IS_FREE = "1024TiB"
_LOOKS_EVERY = 0.2
_FIRST_WAIT, _LONGEST_WAIT, _LIVED_WELL = 0.5, 60.0, 60.0
_ENDS_WITHIN = 5.0


def _registry(directory: Path) -> Path:
    return directory / "backup"


def _description(directory: Path) -> Path:
    return directory / "backup.json"


# In the controller.


class BackupProcess:
    """Keeps the backup service of a server running, from a thread of its own, until :meth:`stop`."""

    def __init__(self, directory: Path, from_checkpoint: bool) -> None:
        self._directory, self._from_checkpoint = directory, from_checkpoint
        self._lock = threading.Lock()
        self._is_ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="eep-backup", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the service. A second call does nothing."""
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
            if self._is_ending.is_set():
                return
            wait = _FIRST_WAIT if time.monotonic() - began > _LIVED_WELL else min(2 * wait, _LONGEST_WAIT)
            logger.warning(
                "eep: the backup process has ended (%s); the controller starts another in %g s",
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
        logger.info("eep: the backup starts, process %d", self._process.pid)
        return self._process

    def _command(self) -> list[str] | None:
        """None until a rank has said what the backup is to keep."""
        command = [sys.executable, "-m", "eep.experts.backup.command", "backup", "serve", "--name", _NAME]
        command += ["--registry", str(_registry(self._directory)), "--memory", _ALL_THAT_IS_FREE]
        if not self._from_checkpoint:
            return command
        try:
            known = json.loads(_description(self._directory).read_text())
        except FileNotFoundError:
            return None
        return [*command, "--checkpoint", known["path"], "--layers", known["layers"], "--dtypes", known["dtypes"]]


def start(directory: Path, kind: str) -> BackupProcess | None:
    """The service that ``--eep-backup`` asks for; None if that is off."""
    return None if kind == "off" else BackupProcess(directory, kind == "checkpoint")


# In a rank.


def describe_checkpoint(directory: Path, path: Path, layers: Sequence[int], layout: ExpertLayout) -> None:
    """Tell the controller what the backup is to keep. Every rank says the same, so the first does."""
    if _description(directory).exists():
        return
    dtypes = [str(spec.dtype).removeprefix("torch.") for spec in layout.tensors]
    description = {"path": str(path), "layers": ",".join(map(str, layers)), "dtypes": ",".join(dtypes)}
    recipe.write(_description(directory), description)


@dataclass(frozen=True)
class BackupAccess:
    """What a rank needs of the backup: to read from it, and to fill it."""

    client: BackupClient | None = None
    offer: LiveOffer | None = None


def connect(directory: Path, kind: str, rank: int, memory: ExpertMemory, shared: Memory, experts: int) -> BackupAccess:
    """A rank that cannot reach the backup serves without it, and logs why."""
    if kind == "off":
        return BackupAccess()
    try:
        registry, engine = DirectoryRegistry(_registry(directory)), Engine()
    except (EepError, OSError) as error:
        logger.warning("eep: rank %d cannot reach the backup and serves without it: %s", rank, error)
        return BackupAccess()
    client = BackupClient(registry, engine, memory.layout, experts)
    if kind == "checkpoint":
        return BackupAccess(client)
    on_host = shared if isinstance(shared, SharedMemory) else None
    return BackupAccess(client, LiveOffer(rank, client, memory, on_host))
