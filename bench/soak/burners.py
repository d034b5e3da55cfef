"""Processes that keep the processors busy beside what is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

_TURNS = 1_000_000


class Burners:
    """``with Burners(15)``: so many processes compute until the block ends, or this process does."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Burners:
        # Without the site packages: a burner starts at once, and has nothing of the checkout in it.
        command = [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid())]
        try:
            for _ in range(self._count):
                self._processes.append(subprocess.Popen(command))
        except OSError:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    @property
    def alive(self) -> int:
        return sum(each.poll() is None for each in self._processes)

    def _end(self) -> None:
        for each in self._processes:
            each.kill()
        for each in self._processes:
            each.wait()


def burn(parent: int) -> None:
    """Until this process has another parent than that one."""
    while os.getppid() == parent:
        for _ in range(_TURNS):
            pass


if __name__ == "__main__":
    burn(int(sys.argv[1]))
