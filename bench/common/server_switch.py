"""A switch in a running server, for a benchmark that compares two ways of doing something in turns.

The benchmark names a module, which is an SGLang plugin of its own. :class:`ServerSwitch` puts it beside one server; it does
nothing in any other.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

_VARIABLE = "EEP_BENCH_SWITCH"
_ROOT = Path(__file__).resolve().parents[2]


class ServerSwitch:
    """In the benchmark: a byte that all processes of the server see. It is 0 at first."""

    def __init__(self, folder: Path, module: str) -> None:
        """``folder`` is made. ``module`` has a function ``register``, which every process of the server calls."""
        folder.mkdir()
        self.folder = folder
        self._path = folder / "switch"
        self._path.write_bytes(b"\0")
        about = folder / "eep_bench-0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: eep-bench\nVersion: 0\n")
        (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\neep_bench = {module}:register\n")

    def environment(self) -> dict[str, str]:
        """What a server must be started with to have the switch."""
        paths = [str(self.folder), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {_VARIABLE: str(self._path), "PYTHONPATH": os.pathsep.join(paths)}

    def turn(self, position: int) -> None:
        with self._path.open("r+b") as file:  # in place: the file is mapped
            file.write(bytes([position]))


def find_switch() -> tuple[mmap.mmap, Path] | None:
    """In a process of the server: the byte as it is now, and the folder of the switch; None where there is no switch."""
    path = os.environ.get(_VARIABLE)
    if path is None:
        return None
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ), Path(path).parent
