"""What SGLang would start its schedulers with, written down instead of started.

SGLang's own code works that out, in every version its own way. We let it, with a ``multiprocessing`` that only takes notes;
the schedulers are started from the notes, when and as often as they are wanted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from sglang_patches import recipe
from sglang_patches.rank import rank_process


class Started(Protocol):
    """The ranks, once all have been noted."""

    def pid(self, rank: int) -> int | None: ...

    def wait_until_loaded(self, rank: int) -> Any: ...


class Notes:
    """Stands in for ``multiprocessing`` while SGLang starts its schedulers: what it would have started is written down."""

    def __init__(self, directory: Path, started: Callable[[int], Started]) -> None:
        self._directory, self._started = directory, started
        self._count = 0
        self._ranks: Started | None = None
        self._before = dict(os.environ)

    def Pipe(self, duplex: bool = True) -> tuple[Loaded, object]:
        return Loaded(self, self._count), _WRITER

    def Process(self, target: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> NotedProcess:
        rank, self._count = self._count, self._count + 1
        return NotedProcess(self, rank, args, kwargs or {})

    def note(self, rank: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        writer = next(index for index, each in enumerate(arguments) if each is _WRITER)
        said = [None if index == writer else each for index, each in enumerate(arguments)]
        # SGLang sets variables around the start of each process, such as which device it may see.
        environment = {name: value for name, value in os.environ.items() if self._before.get(name) != value}
        recipe.write(
            rank_process.recipe_path(self._directory, rank),
            {"arguments": said, "named": named, "writer": writer, "environment": environment},
        )

    def ranks(self) -> Started:
        """All have been noted: start those with which the server starts."""
        if self._ranks is None:
            self._ranks = self._started(self._count)
        return self._ranks


_WRITER = object()


class NotedProcess:
    """What SGLang takes for the process of a scheduler."""

    exitcode: int | None = None

    def __init__(self, notes: Notes, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._notes, self._rank, self._args, self._kwargs = notes, rank, args, kwargs

    def start(self) -> None:
        self._notes.note(self._rank, self._args, self._kwargs)

    @property
    def pid(self) -> int | None:
        return self._notes.ranks().pid(self._rank)

    def is_alive(self) -> bool:
        return True  # somebody will be

    def join(self, timeout: float | None = None) -> None:
        pass


class Loaded:
    """What SGLang takes for the pipe on which a scheduler says that it has loaded its model."""

    def __init__(self, notes: Notes, rank: int) -> None:
        self._notes, self._rank = notes, rank

    def recv(self) -> Any:
        return self._notes.ranks().wait_until_loaded(self._rank)
