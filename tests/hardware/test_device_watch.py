"""Evidence against a real supervisor, told from here and by the process that watches a stand-in for NVML."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from eep.control.supervisor.supervisor import Supervisor
from eep.hardware.device_watch import SignTeller
from eep.hardware.evidence import Evidence, UnknownHardware
from eep.hardware.evidence_desk import EvidenceConflict, EvidenceDesk
from eep.hardware.nvml_reader import DeviceSign
from eep.hardware.rank_device import read_devices, write_device
from eep.hardware.reaction_table import read_table
from eep.observe.event_log import read_events
from eep.operations.operation_runner import OperationRunner
from eep.operations.supervisor_access import SupervisorAccess
from tests.control import ranks
from tests.control.harness import ROOT, patient_policy, record, runs_with, supervised, until
from tests.hardware.test_nvml_reader import STAND_IN, Machine

DEVICES = {0: "GPU-a", 1: "GPU-a", 2: "GPU-b", 3: "GPU-b"}
ALL = (0, 1, 2, 3)


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 120))


@asynccontextmanager
async def on_two_devices() -> AsyncIterator[Supervisor]:
    async with supervised(ranks.steady, policy=patient_policy(4)) as supervisor:
        await until(supervisor, runs_with(supervisor, ALL))
        for rank, name in DEVICES.items():
            write_device(supervisor.directory.path, rank, name)
        yield supervisor


def desk_of(supervisor: Supervisor) -> tuple[EvidenceDesk, OperationRunner]:
    directory = supervisor.directory.path
    runner = OperationRunner(SupervisorAccess(directory))
    names = {rank: (name,) for rank, name in DEVICES.items()}
    return EvidenceDesk(directory, read_table(), runner, lambda: names, ("here",)), runner


def lives(supervisor: Supervisor) -> tuple[int, ...]:
    return record(supervisor).view.incarnations


def test_fatal_evidence_fences_the_ranks_of_the_device_once() -> None:
    async def body() -> None:
        async with on_two_devices() as supervisor:
            desk, _ = desk_of(supervisor)
            given = Evidence("e-1", "xid.79", device="GPU-b")
            for _ in range(2):
                told = await desk.hear(given)
                assert told == {"id": "e-1", "reaction": "fence", "ranks": [2, 3], "operations": []}
                await until(supervisor, lambda: lives(supervisor) == (0, 0, 1, 1))
                await until(supervisor, runs_with(supervisor, ALL))
            assert lives(supervisor) == (0, 0, 1, 1)
            lines = [(line.phase, line.rank, line.cause) for line in read_events(supervisor.directory.events)]
            assert ("EVIDENCE", 2, "xid.79 of GPU-b") in lines
            assert ("FENCING", 3, "the hardware of rank 3 fails: xid.79 of GPU-b") in lines

    run(body)


def test_other_evidence_under_an_id_is_refused_and_does_nothing() -> None:
    async def body() -> None:
        async with on_two_devices() as supervisor:
            desk, _ = desk_of(supervisor)
            await desk.hear(Evidence("e-1", "xid.31", rank=1))
            with pytest.raises(EvidenceConflict, match=r"e-1 is another one \(xid.31\)"):
                await desk.hear(Evidence("e-1", "xid.79", rank=1))
            another, _ = desk_of(supervisor)
            with pytest.raises(EvidenceConflict, match="told before"):
                await another.hear(Evidence("e-1", "xid.79", rank=1))
            assert lives(supervisor) == (0, 0, 0, 0)

    run(body)


def test_a_warning_replaces_the_rank_and_a_note_does_nothing() -> None:
    async def body() -> None:
        async with on_two_devices() as supervisor:
            desk, runner = desk_of(supervisor)
            await desk.hear(Evidence("e-1", "xid.31", rank=1))
            told = await desk.hear(Evidence("e-2", "thermal.shutdown", rank=1))
            assert (told["reaction"], told["operations"]) == ("replace", ["e-2:1"])
            again = await desk.hear(Evidence("e-3", "thermal.shutdown", rank=1))
            assert again["operations"] == ["e-2:1"], "one replacement is enough"
            while runner.table.unfinished():
                await asyncio.sleep(0.05)
            operation = runner.table.get("e-2:1")
            assert operation is not None
            assert (operation.state, lives(supervisor)) == ("done", (0, 1, 0, 0)), operation.reason
            left = [line for line in read_events(supervisor.directory.events) if line.phase == "LEAVING"]
            assert [line.rank for line in left] == [1], "it left before it was started again"

    run(body)


def test_a_process_watches_the_devices_and_ends_with_its_supervisor(tmp_path: Path) -> None:
    async def body() -> None:
        machine = Machine(tmp_path / "state.json")
        async with on_two_devices() as supervisor:
            directory = supervisor.directory.path
            watch = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "eep.hardware.device_watch", "--dir", str(directory)),
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(STAND_IN), str(ROOT), os.environ.get("PYTHONPATH", "")]),
                    "EEP_TEST_NVML": str(machine.path),
                },
                stderr=asyncio.subprocess.PIPE,
            )
            assert watch.stderr is not None
            assert b"2 devices are watched" in await watch.stderr.readline()
            machine.show(lost=["GPU-a"])
            await until(supervisor, lambda: lives(supervisor) == (1, 1, 0, 0))
            assert (
                b"lost of GPU-a: the device has fallen off the bus: fence ranks [0, 1]" in await watch.stderr.readline()
            )
            await until(supervisor, runs_with(supervisor, ALL))
        assert await asyncio.wait_for(watch.wait(), 60) == 0

    run(body)


@pytest.mark.parametrize(
    ("path", "says"), [(str(STAND_IN), b"NVML does not answer"), (None, b"nvidia-ml-py is not installed")]
)
def test_where_nothing_can_be_watched_the_process_ends_and_says_why(
    tmp_path: Path, path: str | None, says: bytes
) -> None:
    if path is None:
        hidden = tmp_path / "hidden"
        hidden.mkdir()
        (hidden / "pynvml.py").write_text("raise ImportError\n")
        path = str(hidden)

    async def body() -> None:
        environment = {name: value for name, value in os.environ.items() if name != "EEP_TEST_NVML"}
        watch = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "eep.hardware.device_watch", "--dir", str(tmp_path)),
            env={**environment, "PYTHONPATH": os.pathsep.join([path, str(ROOT), os.environ.get("PYTHONPATH", "")])},
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await watch.communicate()
        assert (watch.returncode, says in said) == (0, True), said

    run(body)


class Desk:
    def __init__(self, *answers: Any) -> None:
        self.answers, self.heard = list(answers), list[str]()

    async def hear(self, given: Evidence) -> dict[str, Any]:
        self.heard.append(given.id)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, dict)
        return answer


def test_a_sign_is_told_until_it_is_heard_and_others_hardware_is_left_alone() -> None:
    said: list[str] = []
    done = {"reaction": "note", "ranks": [1]}
    desk = Desk(ConnectionError("nobody"), UnknownHardware("of others"), done)
    teller = SignTeller(desk.hear, said.append, "life")

    async def body() -> None:
        teller.add(DeviceSign("GPU-a", "xid.13", "Xid 13"), 0.0)
        teller.add(DeviceSign("GPU-z", "xid.13", "Xid 13"), 0.0)
        for now in (0.0, 1.0, 2.0):
            await teller.tell(now)

    run(body)
    assert desk.heard == ["nvml-life-1", "nvml-life-2", "nvml-life-1"]
    assert said == ["xid.13 of GPU-a: Xid 13: note ranks [1]"]


def test_a_sign_that_nobody_hears_is_given_up_in_the_end() -> None:
    said: list[str] = []
    desk = Desk(*(ConnectionError("nobody") for _ in range(3)))
    teller = SignTeller(desk.hear, said.append, "life")

    async def body() -> None:
        teller.add(DeviceSign("GPU-a", "lost", ""), 0.0)
        for now in (0.0, 59.0, 61.0, 62.0):
            await teller.tell(now)

    run(body)
    assert len(desk.heard) == 3
    assert said == ["lost of GPU-a was not acted on: nobody"]


def test_what_is_no_file_of_a_rank_is_skipped(tmp_path: Path) -> None:
    write_device(tmp_path, 3, "GPU-a")
    (tmp_path / "device-x").write_text("GPU-b")
    (tmp_path / "device-4").write_bytes(b"\xff")
    (tmp_path / "device-5").write_text("")
    assert read_devices(tmp_path) == {3: "GPU-a"}
    write_device(tmp_path, 3, "GPU-c")
    assert read_devices(tmp_path) == {3: "GPU-c"}
    assert json.dumps(sorted(path.name for path in tmp_path.iterdir())).count("device-3") == 1
