"""Why a native library cannot be loaded here. The loader's own words mislead: for a library of another machine they are
"No such file or directory"."""

from __future__ import annotations

import pathlib
import platform
import struct

_MACHINES = {3: "x86", 21: "ppc64", 22: "s390x", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
"""Numbers of ELF's ``e_machine``, and what ``platform.machine`` calls them."""
_HEADER_BYTES = 20
_BIG_ENDIAN = 2


def why_not_loaded(path: pathlib.Path, error: OSError) -> str:
    """A sentence on the library at ``path``, which the loader refused with ``error``; and what to do."""
    try:
        machine = machine_of(path)
    except OSError as unread:
        return f"{path} cannot be read: {unread}; run 'make native' in the source tree, or install the package with pip"
    if machine is None:
        return f"{path} is no library; run 'make native' in the source tree, or install the package with pip again"
    if machine != (here := platform.machine()):
        return (
            f"{path} was built for {machine}, and this machine is {here}: run 'make native' in the source tree, or install "
            "the package with pip here"
        )
    return f"{path} cannot be loaded: {error}; install what it needs, or run 'make native' in the source tree"


def machine_of(path: pathlib.Path) -> str | None:
    """The machine that a library was built for; None if the file is no library."""
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES or not header.startswith(b"\x7fELF"):
        return None
    (number,) = struct.unpack_from(">H" if header[5] == _BIG_ENDIAN else "<H", header, 18)
    return _MACHINES.get(number, f"machine {number} of ELF")
