"""``--eep-backup``: a process beside the supervisor keeps every expert in host memory, and ranks read from it.

The process is ``eep backup serve`` on a registry below the supervisor's private directory. It belongs to no rank. The
controller starts it again when it ends, and ends it with the server; if the controller cannot, the supervisor's keeper does.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eep.control.launch.kept_process import KeptProcess
from eep.data_plane.memory import Memory
from eep.data_plane.memory.shm import SharedMemory
from eep.errors import EepError
from eep.experts.backup import backup_standing
from eep.experts.backup.backup_client import BackupClient
from eep.experts.backup.live_offer import LiveOffer
from eep.experts.backup.transfer_engine import Engine
from eep.experts.layout import ExpertLayout, ExpertMemory
from eep.experts.registry.directory_registry import DirectoryRegistry
from sglang_patches import recipe

logger = logging.getLogger(__name__)

_NAME = "host"
_ALL_THAT_IS_FREE = "1024TiB"


def _registry(directory: Path) -> Path:
    return directory / backup_standing.DIRECTORY


def _description(directory: Path) -> Path:
    return directory / "backup.json"


# In the controller.


def backup_command(directory: Path, *, from_checkpoint: bool) -> list[str] | None:
    """What the backup process runs; None until a rank has said what it is to keep."""
    command = [sys.executable, "-m", "eep.experts.backup.command", "backup", "serve", "--name", _NAME]
    command += ["--registry", str(_registry(directory)), "--memory", _ALL_THAT_IS_FREE]
    if not from_checkpoint:
        return command
    try:
        known = json.loads(_description(directory).read_text())
    except FileNotFoundError:
        return None
    return [*command, "--checkpoint", known["path"], "--layers", known["layers"], "--dtypes", known["dtypes"]]


def start(directory: Path, kind: str) -> KeptProcess | None:
    """The service that ``--eep-backup`` asks for; None if that is off."""
    if kind == "off":
        return None
    return KeptProcess("backup", directory, lambda: backup_command(directory, from_checkpoint=kind == "checkpoint"))


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
