"""Reads signs of failing hardware from NVML, the library that comes with NVIDIA's driver. It makes no CUDA context.

``nvidia-ml-py`` speaks to the library; it is loaded here, when it is first needed. Events of the driver (Xid, memory errors)
come by themselves. The rest is asked for at every look: whether a device answers, how many memory errors it has had, how hot
it is. A state that lasts is told once.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass, field
from typing import Any

MODULE = "pynvml"
_PAUSE_S = 0.2
_NEAR_SHUTDOWN = 3
"""Degrees."""


class NvmlMissing(Exception):
    """There is no NVML here, or it does not answer. Its text says what is missing."""


@dataclass(frozen=True, slots=True)
class DeviceSign:
    """``device``: the UUID of a GPU. ``sign``: a row of the table of reactions."""

    device: str
    sign: str
    detail: str


@dataclass
class _Watched:
    """One device, and what was last seen of it."""

    handle: Any
    uuid: str
    shutdown_at: int | None
    errors: dict[str, int] = field(default_factory=dict)
    lasting: set[str] = field(default_factory=set)


class NvmlReader:
    """Every GPU of this machine. Call it from one thread; :meth:`look` may take long where a device hangs."""

    def __init__(self) -> None:
        try:
            self._nvml: Any = importlib.import_module(MODULE)
        except ImportError:
            raise NvmlMissing("the package nvidia-ml-py is not installed") from None
        try:
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._events = self._nvml.nvmlEventSetCreate()
        except self._nvml.NVMLError as error:
            raise NvmlMissing(f"NVML does not answer: {error}") from error
        self._early: list[DeviceSign] = []
        self._watched = [each for number in range(count) if (each := self._watch(number)) is not None]

    @property
    def devices(self) -> tuple[str, ...]:
        """Their UUIDs."""
        return tuple(each.uuid for each in self._watched)

    def close(self) -> None:
        self._nvml.nvmlEventSetFree(self._events)
        self._nvml.nvmlShutdown()

    def look(self, seconds: float) -> list[DeviceSign]:
        """Waits for an event of the driver, at most so long, and looks at every device. What is new."""
        found, self._early = self._early, []
        found += self._waited(seconds)
        for each in self._watched:
            found += self._look_at(each)
        return found

    def _watch(self, number: int) -> _Watched | None:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError:
            return None  # no rank can have begun on it
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeSingleBitEccError
        wanted |= nvml.nvmlEventTypeDoubleBitEccError
        supported = self._asked(nvml.nvmlDeviceGetSupportedEventTypes, handle)
        if supported is not None and supported & wanted:
            self._asked(nvml.nvmlDeviceRegisterEvents, handle, supported & wanted, self._events)
        threshold = nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN
        watched = _Watched(handle, uuid, self._asked(nvml.nvmlDeviceGetTemperatureThreshold, handle, threshold))
        self._early += self._look_at(watched)  # counts from before are no news; a state that lasts is
        return watched

    def _waited(self, seconds: float) -> list[DeviceSign]:
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, max(1, int(seconds * 1000)))
            uuid = _text(nvml.nvmlDeviceGetUUID(event.device))
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_TIMEOUT:
                # Its device is lost, which the look at it says; or there are no events here, and no call waits for one.
                time.sleep(min(seconds, _PAUSE_S))
            return []
        if event.eventType == nvml.nvmlEventTypeXidCriticalError:
            return [DeviceSign(uuid, f"xid.{event.eventData}", f"Xid {event.eventData}")]
        is_corrected = event.eventType == nvml.nvmlEventTypeSingleBitEccError
        return [DeviceSign(uuid, "ecc.corrected" if is_corrected else "ecc.uncorrected", "an event of the driver")]

    def _look_at(self, watched: _Watched) -> list[DeviceSign]:
        nvml, handle, found = self._nvml, watched.handle, []
        try:
            temperature = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_GPU_IS_LOST:
                return []
            return self._lasts(watched, "lost", True, "the device has fallen off the bus")
        self._lasts(watched, "lost", False, "")
        if watched.shutdown_at:
            is_near = temperature >= watched.shutdown_at - _NEAR_SHUTDOWN
            text = f"{temperature} degrees; it turns itself off at {watched.shutdown_at}"
            found += self._lasts(watched, "thermal.shutdown", is_near, text)
        slowed = self._asked(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        is_slow = bool(slowed & nvml.nvmlClocksThrottleReasonHwThermalSlowdown)
        found += self._lasts(watched, "thermal.slowdown", is_slow, f"clocked down at {temperature} degrees")
        for sign, kind in (
            ("ecc.uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            ("ecc.corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        ):
            count = self._asked(nvml.nvmlDeviceGetTotalEccErrors, handle, kind, nvml.NVML_VOLATILE_ECC)
            if count is not None and count > watched.errors.setdefault(sign, count):
                found.append(DeviceSign(watched.uuid, sign, f"{count - watched.errors[sign]} memory errors more"))
                watched.errors[sign] = count
        return found

    def _lasts(self, watched: _Watched, sign: str, is_so: bool, text: str) -> list[DeviceSign]:
        if not is_so:
            watched.lasting.discard(sign)
            return []
        is_new = sign not in watched.lasting
        watched.lasting.add(sign)
        return [DeviceSign(watched.uuid, sign, text)] if is_new else []

    def _asked(self, function: Any, *arguments: Any) -> Any:
        """None where a device does not support the question, or does not answer it."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
