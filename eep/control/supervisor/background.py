"""A supervisor in a thread of a process that has other things to do, such as a server's controller.

It takes no signals: the caller starts and stops it. If the process is killed, the supervisor's keeper ends the
ranks as always.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from eep.control.supervisor.supervisor import STOPS_WITHIN, Supervisor

T = TypeVar("T")
STARTS_WITHIN = 30.0


class BackgroundSupervisor:
    """Calls ``make`` in the thread, so that the supervisor and its watchers belong there."""

    def __init__(self, make: Callable[[], Supervisor]) -> None:
        self._make = make
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="eep-supervisor", daemon=True)
        self._supervisor: Supervisor | None = None

    @property
    def supervisor(self) -> Supervisor:
        """For reading from any thread what does not change: its directory and its name."""
        if self._supervisor is None:
            raise RuntimeError("the supervisor has not been started; call start() first")
        return self._supervisor

    def start(self) -> None:
        """Returns when it listens. What keeps it from starting is raised here."""

        async def begin() -> None:
            self._supervisor = self._make()
            await self._supervisor.start()

        self._thread.start()
        try:
            self._submit(begin()).result(STARTS_WITHIN)
        except BaseException:
            self._end_thread()
            raise

    def stop(self) -> None:
        """End every rank and the thread. Doing it again does nothing."""
        if not self._thread.is_alive():
            return
        try:
            self._submit(self.supervisor.stop()).result(2 * STOPS_WITHIN)
        finally:
            self._end_thread()

    def call(self, function: Callable[[Supervisor], T], within: float = STARTS_WITHIN) -> T:
        """What ``function`` returns when it is called in the supervisor's thread."""

        async def run() -> T:
            return function(self.supervisor)

        return self._submit(run()).result(within)

    def wait_until(self, condition: Callable[[Supervisor], bool], within: float) -> None:
        """Return when ``condition``, looked at in the supervisor's thread, holds; TimeoutError after ``within`` s."""
        supervisor = self.supervisor

        async def wait() -> None:
            await asyncio.wait_for(supervisor.wait_until(lambda: condition(supervisor)), within)

        self._submit(wait()).result(within + STARTS_WITHIN)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOPS_WITHIN)
