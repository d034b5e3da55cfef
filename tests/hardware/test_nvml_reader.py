"""What is read from a stand-in for NVML: each thing once, and nothing from what a device cannot tell."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from eep.hardware.nvml_reader import DeviceSign, NvmlMissing, NvmlReader

STAND_IN = Path(__file__).parent / "stand_in"


class Machine:
    """The state that the stand-in shows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.show()

    def show(self, **state: Any) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(state))
        fresh.rename(self.path)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("EEP_TEST_NVML", str(tmp_path / "state.json"))
    return Machine(tmp_path / "state.json")


def signs(reader: NvmlReader) -> list[tuple[str, str]]:
    return [(each.device, each.sign) for each in reader.look(0.01)]


def test_a_machine_that_is_well_says_nothing(machine: Machine) -> None:
    reader = NvmlReader()
    assert reader.devices == ("GPU-a", "GPU-b")
    assert signs(reader) == []
    reader.close()


def test_an_event_of_the_driver_is_told_once_with_its_number(machine: Machine) -> None:
    reader = NvmlReader()
    machine.show(events=[["GPU-b", 8, 79]])
    assert reader.look(0.01) == [DeviceSign("GPU-b", "xid.79", "Xid 79")]
    assert signs(reader) == []
    machine.show(events=[["GPU-b", 8, 79], ["GPU-a", 2, 0]])
    assert signs(reader) == [("GPU-a", "ecc.uncorrected")]


def test_a_lost_device_is_told_once_until_it_answers_again(machine: Machine) -> None:
    reader = NvmlReader()
    machine.show(lost=["GPU-a"])
    assert signs(reader) == [("GPU-a", "lost")]
    assert signs(reader) == []
    machine.show()
    assert signs(reader) == []
    machine.show(lost=["GPU-a"])
    assert signs(reader) == [("GPU-a", "lost")]


def test_heat_is_told_when_it_begins_to_slow_and_before_the_device_turns_itself_off(machine: Machine) -> None:
    reader = NvmlReader()
    machine.show(temperature={"GPU-a": 80}, slowed=["GPU-a"])
    assert signs(reader) == [("GPU-a", "thermal.slowdown")]
    machine.show(temperature={"GPU-a": 87}, slowed=["GPU-a"])
    assert signs(reader) == [("GPU-a", "thermal.shutdown")]


def test_memory_errors_from_before_are_no_news(machine: Machine) -> None:
    machine.show(uncorrected={"GPU-a": 7})
    reader = NvmlReader()
    assert signs(reader) == []
    machine.show(uncorrected={"GPU-a": 9})
    assert reader.look(0.01) == [DeviceSign("GPU-a", "ecc.uncorrected", "2 memory errors more")]
    assert signs(reader) == []


def test_a_device_that_is_lost_from_the_beginning_is_told_at_the_first_look(machine: Machine) -> None:
    machine.show(lost=["GPU-b"])
    assert signs(NvmlReader()) == [("GPU-b", "lost")]


def test_a_machine_that_gives_no_events_is_not_asked_without_a_pause(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []
    monkeypatch.setattr("eep.hardware.nvml_reader.time.sleep", paused.append)
    machine.show(deaf=True)
    reader = NvmlReader()
    assert signs(reader) == []
    assert len(paused) == 1
    machine.show(deaf=True, lost=["GPU-a"])
    assert signs(reader) == [("GPU-a", "lost")], "what is asked for is told all the same"


def test_without_a_driver_or_the_package_it_is_said_what_is_missing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EEP_TEST_NVML")
    with pytest.raises(NvmlMissing, match="does not answer"):
        NvmlReader()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlMissing, match="nvidia-ml-py is not installed"):
        NvmlReader()
