"""The ranks note when their steps begin, for the bench of takeovers: whether steps take longer after a kill, or have less in
them. This file is an SGLang plugin of its own, which :class:`StepNotes` puts beside a server.
"""

from __future__ import annotations

from pathlib import Path

from bench.common.server_switch import ServerSwitch, find_switch
from bench.common.step_log import note_steps, read_steps_by_process

_MODULE = "bench.takeover.step_notes"


class StepNotes(ServerSwitch):
    """In the bench."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _MODULE)

    def read(self) -> dict[int, list[float]]:
        """When the latest steps of each process began, of some minutes under load."""
        return read_steps_by_process(self.folder)


def register() -> None:
    """In every process of the server."""
    if (found := find_switch()) is not None:
        note_steps(found[1])
