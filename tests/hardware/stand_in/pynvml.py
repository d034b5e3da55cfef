"""A stand-in for nvidia-ml-py: two devices, whose state is a JSON file that ``EEP_TEST_NVML`` names.

``{"lost": [uuid], "temperature": {uuid: degrees}, "slowed": [uuid], "uncorrected": {uuid: count},
"events": [[uuid, type, data], …], "deaf": true}``. An event is told once; what the file has beyond those that were told
before is new. A deaf machine gives no events, and says so at once.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_UNKNOWN = 3, 10, 15, 999
nvmlEventTypeSingleBitEccError, nvmlEventTypeDoubleBitEccError, nvmlEventTypeXidCriticalError = 1, 2, 8
NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SHUTDOWN = 0, 0
NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 0
nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
DEVICES = ("GPU-a", "GPU-b")
SHUTDOWN_AT = 90

_told = 0


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


def _state() -> dict[str, Any]:
    path = os.environ.get("EEP_TEST_NVML")
    if path is None:
        raise NVMLError(9)
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


def _answers(uuid: str) -> dict[str, Any]:
    state = _state()
    if uuid in state.get("lost", ()):
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return state


def nvmlInit() -> None:
    _state()


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return len(DEVICES)


def nvmlDeviceGetHandleByIndex(number: int) -> str:
    return DEVICES[number]


def nvmlDeviceGetUUID(handle: str) -> bytes:
    return handle.encode()  # as older versions have it


def nvmlEventSetCreate() -> object:
    return object()


def nvmlEventSetFree(_: object) -> None:
    pass


def nvmlDeviceGetSupportedEventTypes(_: str) -> int:
    return nvmlEventTypeXidCriticalError | nvmlEventTypeDoubleBitEccError


def nvmlDeviceRegisterEvents(_: str, kinds: int, __: object) -> None:
    if kinds & nvmlEventTypeSingleBitEccError:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)


def nvmlEventSetWait_v2(_: object, milliseconds: int) -> SimpleNamespace:
    global _told
    end = time.monotonic() + milliseconds / 1000
    while True:
        if _state().get("deaf"):
            raise NVMLError(NVML_ERROR_UNKNOWN)
        events = _state().get("events", [])
        if len(events) > _told:
            uuid, kind, data = events[_told]
            _told += 1
            return SimpleNamespace(device=uuid, eventType=kind, eventData=data)
        if time.monotonic() >= end:
            raise NVMLError(NVML_ERROR_TIMEOUT)
        time.sleep(0.005)


def nvmlDeviceGetTemperature(handle: str, _: int) -> int:
    return int(_answers(handle).get("temperature", {}).get(handle, 40))


def nvmlDeviceGetTemperatureThreshold(_: str, __: int) -> int:
    return SHUTDOWN_AT


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: str) -> int:
    return nvmlClocksThrottleReasonHwThermalSlowdown if handle in _answers(handle).get("slowed", ()) else 0


def nvmlDeviceGetTotalEccErrors(handle: str, kind: int, _: int) -> int:
    state = _answers(handle)
    if kind == NVML_MEMORY_ERROR_TYPE_CORRECTED:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return int(state.get("uncorrected", {}).get(handle, 0))
