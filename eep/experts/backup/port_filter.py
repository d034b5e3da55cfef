"""Keeps strangers off the ports of a transfer engine: connections to any other address than the named one are dropped.

Mooncake listens on all interfaces, whatever address it is given. A socket filter on its listening sockets has the kernel drop
what was sent to another address of this host, before a connection comes to be. It needs no rights.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Container, Iterable, Iterator

_SO_ATTACH_FILTER = 26
_NETWORK_HEADER = -0x100000 & 0xFFFFFFFF  # SKF_NET_OFF of linux/filter.h: offsets count from the header of IP
_LOAD_WORD, _LOAD_BYTE, _AND, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x06
_TARGET_AT = {4: 16, 6: 24}


def open_sockets() -> dict[str, int]:
    """The sockets of this process: a name that is never used twice, and the descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it has gone
            found[os.readlink(f"/proc/self/fd/{name}")] = int(name)
    return {name: descriptor for name, descriptor in found.items() if name.startswith("socket:")}


def filter_new_listeners(before: Container[str], address: str) -> int:
    """Only connections to ``address`` reach the sockets that listen on all interfaces and were not open ``before``. Returns
    how many there are. OSError if the kernel refuses."""
    program = _program(address)
    code = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    count = 0
    for listener in _listeners(descriptor for name, descriptor in open_sockets().items() if name not in before):
        with listener:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)
            count += 1
    return count


def _listeners(found: Iterable[int]) -> Iterator[socket.socket]:
    """Of these, the sockets that listen on all interfaces: copies, for the caller to close."""
    for descriptor in found:
        try:
            listener = socket.socket(fileno=os.dup(descriptor))
        except OSError:  # it has gone
            continue
        if (
            listener.family in (socket.AF_INET, socket.AF_INET6)
            and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            and ipaddress.ip_address(listener.getsockname()[0]).is_unspecified
        ):
            yield listener
        else:
            listener.close()


def _program(address: str) -> bytes:
    """A filter that keeps packets of IP to ``address``, and drops all others."""
    target = ipaddress.ip_address(address)
    words = [target.packed[at : at + 4] for at in range(0, len(target.packed), 4)]
    checks = [(_TARGET_AT[target.version] + 4 * index, int.from_bytes(word)) for index, word in enumerate(words)]
    steps = 2 * len(checks) + 1
    program = [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_AND, 0, 0, 0xF0),
        (_JUMP_IF_EQUAL, 0, steps, target.version << 4),
    ]
    for index, (offset, word) in enumerate(checks):
        program.append((_LOAD_WORD, 0, 0, _NETWORK_HEADER + offset))
        program.append((_JUMP_IF_EQUAL, 0, steps - 2 * index - 2, word))
    program += [(_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)]
    return b"".join(struct.pack("HBBI", *step) for step in program)
