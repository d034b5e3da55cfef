"""The process that watches the devices of a host: ``python -m eep.hardware.device_watch --dir DIR``.

It is a process of its own, since a call into a driver whose device has failed may hang, or end the process that made it. It
speaks to the supervisor as an operator does, and ends when the supervisor does. 0: there is nothing to watch here.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eep.control.private_directory import PrivateDirectory
from eep.hardware.evidence import BadEvidence, Evidence, UnknownHardware
from eep.hardware.evidence_desk import EvidenceDesk
from eep.hardware.nvml_reader import DeviceSign, NvmlMissing, NvmlReader
from eep.hardware.rank_device import read_devices
from eep.hardware.reaction_table import BadReactions, read_table
from eep.hardware.served_desk import ServedDesk
from eep.operations.operation_runner import OperationRunner, OrderRefused
from eep.operations.operation_table import TooManyOperations
from eep.operations.supervisor_access import SupervisorAccess

_LOOKS_EVERY = 1.0
_TOLD_WITHIN = 60.0
_MOST_WAITING = 1024


class SignTeller:
    """Tells signs to the desk, each until it is heard, or is too old. ``say`` writes a line for people."""

    def __init__(self, hear: Callable[[Evidence], Any], say: Callable[[str], None], life: str) -> None:
        self._hear, self._say, self._life = hear, say, life
        self._waiting: deque[tuple[float, Evidence]] = deque(maxlen=_MOST_WAITING)
        self._count = 0

    def add(self, found: DeviceSign, now: float) -> None:
        self._count += 1
        ident = f"nvml-{self._life}-{self._count}"
        self._waiting.append((now, Evidence(ident, found.sign, device=found.device, detail=found.detail)))

    async def tell(self, now: float) -> None:
        for _ in range(len(self._waiting)):
            since, given = self._waiting.popleft()
            try:
                done = await self._hear(given)
                self._say(f"{given.text}: {done['reaction']} ranks {done['ranks']}")
            except UnknownHardware:
                continue  # it is another program's
            except BadEvidence as error:
                self._say(f"{given.text}: {error}")
            except (OSError, OrderRefused, TooManyOperations) as error:
                if now - since < _TOLD_WITHIN:
                    self._waiting.append((since, given))
                else:
                    self._say(f"{given.text} was not acted on: {error}")


def _names(directory: Path) -> Mapping[int, tuple[str, ...]]:
    return {rank: (name,) for rank, name in read_devices(directory).items()}


async def watch(directory: Path, table: Path | None) -> int:
    try:
        reactions = read_table(table)
        reader = await asyncio.to_thread(NvmlReader)
    except (NvmlMissing, BadReactions) as error:
        _say(f"devices are not watched: {error}")
        return 0
    _say(f"{len(reader.devices)} devices are watched for failures")
    runner = OperationRunner(SupervisorAccess(directory))
    own = EvidenceDesk(directory, reactions, runner, lambda: _names(directory), ())
    teller = SignTeller(ServedDesk(directory, reactions, own).hear, _say, secrets.token_hex(4))
    socket = PrivateDirectory(directory).socket
    while socket.exists():
        for found in await asyncio.to_thread(reader.look, _LOOKS_EVERY):
            teller.add(found, time.monotonic())
        await teller.tell(time.monotonic())
    return 0


def _say(text: str) -> None:
    print(f"eep: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="eep.hardware.device_watch")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--reactions", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # what became of ranks that were to be replaced
    return asyncio.run(watch(options.dir, options.reactions))


if __name__ == "__main__":
    sys.exit(main())
