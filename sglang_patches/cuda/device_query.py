"""Prints what there is to know of the GPUs, as JSON. Run as a program, it opens them in a process of its own.

It imports nothing but the standard library, so that it takes no longer than the driver does.
"""

from __future__ import annotations

import ctypes
import json
import sys

DRIVER = "libcuda.so.1"
ATTRIBUTES = {
    "major": 75,
    "minor": 76,
    "multi_processor_count": 16,
    "warp_size": 10,
    "max_threads_per_block": 1,
    "max_threads_per_multi_processor": 39,
    "regs_per_multiprocessor": 82,
    "shared_memory_per_block": 8,
    "shared_memory_per_block_optin": 97,
    "shared_memory_per_multiprocessor": 81,
    "L2_cache_size": 38,
    "is_integrated": 18,
    "clock_rate": 13,
    "memory_clock_rate": 36,
    "memory_bus_width": 37,
}
"""The names that torch gives to attributes, and the driver's numbers of them."""


def query() -> list[dict[str, int | str]]:
    """The attributes of each GPU that this process may use, with its name and its memory. OSError if the driver is not
    there or fails."""
    driver = ctypes.CDLL(DRIVER)

    def call(name: str, *arguments: object) -> None:
        if status := getattr(driver, name)(*arguments):
            raise OSError(f"{name} failed with status {status}")

    call("cuInit", 0)
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    found = []
    for ordinal in range(count.value):
        device, number = ctypes.c_int(), ctypes.c_int()
        call("cuDeviceGet", ctypes.byref(device), ordinal)
        facts: dict[str, int | str] = {}
        for name, attribute in ATTRIBUTES.items():
            call("cuDeviceGetAttribute", ctypes.byref(number), attribute, device)
            facts[name] = number.value
        text, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
        call("cuDeviceGetName", text, len(text), device)
        call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        found.append({**facts, "name": text.value.decode(), "total_memory": memory.value})
    return found


if __name__ == "__main__":
    json.dump(query(), sys.stdout)
