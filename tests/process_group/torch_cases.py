"""PyTorch's tests themselves, as :mod:`tests.process_group.torch_suite` runs them; imported only by its runners.

What is different from how torch runs them: ranks are forked from a server that has imported everything, ranks meet at a
semaphore rather than at files that are looked at ten times a second, and the backend is ours.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import time
import unittest
from typing import Any

from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

from tests.process_group.torch_suite import PATIENCE_S

# What is decided by the name while the tests are imported has been decided.
distributed_test.BACKEND = os.environ["EEP_TESTED_BACKEND"]
# Of any other, tests of subgroups ask for eight ranks before they run.
os.environ["BACKEND"] = "mpi"

_CARRIED = ("TEMP_DIR", "INIT_METHOD", "MASTER_ADDR")
"""Variables that each case sets, and that a process forked from the server has not got."""


class Cases(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
    """Every case of torch's suite."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def tearDown(self) -> None:
        processes = list(self.processes)
        super().tearDown()  # asks what is left to end
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def _spawn_processes(self) -> None:
        context = multiprocessing.get_context("forkserver")
        meeting = self._meeting = context.Barrier(int(self.world_size))  # kept: its semaphores end with it
        carried = {name: os.environ[name] for name in _CARRIED}

        def process(target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return context.Process(target=_run_rank, args=(meeting, carried, args), name=name, daemon=True)

        self._start_processes(process)

    def _join_processes(self, fn: Any) -> None:
        """Torch looks ten times a second; here it looks when there is something to see."""
        end = time.monotonic() + PATIENCE_S
        running = list(self.processes)
        while running and all(process.exitcode in (0, None) for process in self.processes):
            if not multiprocessing.connection.wait([p.sentinel for p in running], end - time.monotonic()):
                break
            running = [process for process in running if process.exitcode is None]
        super()._join_processes(fn)
        # Torch looks at the first only.
        self.assertEqual({process.exitcode for process in self.processes}, {0}, "how the ranks ended")


def _run_rank(meeting: Any, carried: dict[str, str], args: tuple[Any, ...]) -> None:
    os.environ.update(carried)
    distributed_test.INIT_METHOD = carried["INIT_METHOD"]

    def sync(wait_for: int | None = None, timeout: float = PATIENCE_S) -> None:
        meeting.wait(PATIENCE_S)

    distributed_test.Barrier.sync = sync
    Cases._run(*args)


def all_cases() -> list[str]:
    """Everything in torch's module that a loader of tests would find."""
    loader = unittest.TestLoader()
    others = [
        kind
        for kind in vars(distributed_test).values()
        if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == distributed_test.__name__
    ]
    return sorted(loader.getTestCaseNames(Cases)) + sorted(
        f"{kind.__name__}.{name}" for kind in others for name in loader.getTestCaseNames(kind)
    )
