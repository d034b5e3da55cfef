"""PyTorch's tests themselves, as :mod:`tests.process_group.torch_suite` runs them; imported only by its runners.

What is different from how torch runs them: ranks are forked from a process that has imported everything, they meet at a
semaphore rather than at files that are looked at ten times a second, how every rank has ended counts, and the backend is
ours, on several hosts if so asked.
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

import eep
from tests.process_group.torch_suite import PATIENCE_S

HOSTS = int(os.environ["EEP_TESTED_HOSTS"])
"""On how many the ranks are: each is an address of the loopback."""

# What is decided by the name while the tests are imported has been decided.
distributed_test.BACKEND = os.environ["EEP_TESTED_BACKEND"]
if HOSTS > 1:
    _init_process_group = distributed_test.dist.init_process_group

    def _over_hosts(*args: Any, **named: Any) -> None:
        host = eep.pg.Host(f"127.0.0.{named['rank'] % HOSTS + 1}", b"k" * 32)
        _init_process_group(*args, **named, pg_options=eep.pg.Options(host=host))

    distributed_test.dist.init_process_group = _over_hosts
# Of any other, tests of subgroups ask for eight ranks before they run.
os.environ["BACKEND"] = "mpi"


class Cases(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
    """Every case of torch's suite."""

    def setUp(self) -> None:
        super().setUp()
        # Taken from the environment once, when the module was imported; each case has its own.
        distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]
        # This process has no threads, so that it may fork.
        context = multiprocessing.get_context("fork")
        meeting = context.Barrier(int(self.world_size))
        distributed_test.Barrier.sync = lambda *_, **__: meeting.wait(PATIENCE_S)
        self._start_processes(context.Process)

    def tearDown(self) -> None:
        processes = list(self.processes)
        super().tearDown()  # asks what is left to end
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def _join_processes(self, fn: Any) -> None:
        end = time.monotonic() + PATIENCE_S
        running = list(self.processes)
        while running and all(process.exitcode in (0, None) for process in self.processes):
            if not multiprocessing.connection.wait([p.sentinel for p in running], end - time.monotonic()):
                break
            running = [process for process in running if process.exitcode is None]
        super()._join_processes(fn)
        assert {process.exitcode for process in self.processes} == {0}, "a rank did not end as it should"


def all_cases() -> list[str]:
    """Everything in torch's module that a loader of tests would find."""
    loader = unittest.TestLoader()
    others = [
        kind
        for kind in vars(distributed_test).values()
        if isinstance(kind, type)
        and issubclass(kind, unittest.TestCase)
        and kind.__module__ == distributed_test.__name__
        and not issubclass(Cases, kind)
    ]
    return sorted(loader.getTestCaseNames(Cases)) + sorted(
        f"{kind.__name__}.{name}" for kind in others for name in loader.getTestCaseNames(kind)
    )
