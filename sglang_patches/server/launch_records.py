"""What SGLang would start its schedulers with, recorded in files instead of started.

SGLang's own code works that out, in every version its own way. We let it, with a ``multiprocessing`` that only records; the
supervisor starts the schedulers from the records, when and as often as it wants them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from sglang_patches import recipe
from sglang_patches.rank import rank_process


class StartedRanks(Protocol):
    """The ranks of the server, once all of them are recorded."""

    def pid(self, rank: int) -> int | None: ...

    def wait_until_loaded(self, rank: int) -> Any: ...


class LaunchRecorder:
    """Stands in for ``multiprocessing`` while SGLang starts its schedulers: it records them and starts none."""

    def __init__(self, directory: Path, start: Callable[[int], StartedRanks]) -> None:
        """``start(count)`` starts the ranks, once all ``count`` of them are recorded."""
        self._directory, self._start = directory, start
        self._count = 0
        self._ranks: StartedRanks | None = None
        self._before = dict(os.environ)

    def Pipe(self, duplex: bool = True) -> tuple[LoadedPipe, object]:
        return LoadedPipe(self, self._count), _WRITER

    def Process(
        self, target: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> RecordedProcess:
        rank, self._count = self._count, self._count + 1
        return RecordedProcess(self, rank, args, kwargs or {})

    def record(self, rank: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        writer = next(index for index, each in enumerate(arguments) if each is _WRITER)
        written = [None if index == writer else each for index, each in enumerate(arguments)]
        # SGLang sets variables around the start of each process, such as which device it may see.
        environment = {name: value for name, value in os.environ.items() if self._before.get(name) != value}
        recipe.write(
            rank_process.recipe_path(self._directory, rank),
            {"arguments": written, "named": named, "writer": writer, "environment": environment},
        )

    def started_ranks(self) -> StartedRanks:
        """The ranks. The first call starts those with which the server starts: SGLang has recorded all by then."""
        if self._ranks is None:
            self._ranks = self._start(self._count)
        return self._ranks


_WRITER = object()


class RecordedProcess:
    """What SGLang takes for the process of a scheduler."""

    exitcode: int | None = None

    def __init__(self, recorder: LaunchRecorder, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._recorder, self._rank, self._args, self._kwargs = recorder, rank, args, kwargs

    def start(self) -> None:
        self._recorder.record(self._rank, self._args, self._kwargs)

    @property
    def pid(self) -> int | None:
        return self._recorder.started_ranks().pid(self._rank)

    def is_alive(self) -> bool:
        return True  # the supervisor starts it again whenever it dies

    def join(self, timeout: float | None = None) -> None:
        pass


class LoadedPipe:
    """What SGLang takes for the pipe on which a scheduler says that it has loaded its model."""

    def __init__(self, recorder: LaunchRecorder, rank: int) -> None:
        self._recorder, self._rank = recorder, rank

    def recv(self) -> Any:
        return self._recorder.started_ranks().wait_until_loaded(self._rank)
