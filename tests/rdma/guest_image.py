"""What a guest boots: the kernel, and an initial file system with busybox, modules, libfabric and the program of a rank."""

from __future__ import annotations

import platform
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.rdma.guest_kernel import GuestKernel, fetch_kernel

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "rdma"
LIBRARIES = Path("/usr/lib") / f"{platform.machine()}-linux-gnu"
BUSYBOX, RDMA = Path("/bin/busybox"), Path("/usr/bin/rdma")
DRIVER = Path("/etc/libibverbs.d/rxe.driver")

INIT = """#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs devtmpfs /dev
for module in /modules/*; do /bin/busybox insmod $module; done
/bin/busybox ip link set lo up
/bin/busybox ip address add $ADDRESS/24 dev eth0
/bin/busybox ip link set eth0 up
/usr/bin/rdma link add rxe0 type rxe netdev eth0
# The provider keeps buffers for as many peers as it is told of, and a guest has little memory.
export FI_UNIVERSE_SIZE=4
exec /guest_rank /dev/vport*
"""
"""RANK, INCARNATION and ADDRESS are words of the kernel's command line, which it hands to its first process."""


@dataclass(frozen=True, slots=True)
class GuestImage:
    kernel: Path
    files: Path


def build_image() -> GuestImage:
    """Needs the native library in ``eep/lib``."""
    CACHE.mkdir(parents=True, exist_ok=True)
    kernel = fetch_kernel(CACHE)
    program = _build_program()
    files = dict(_files(kernel, program))
    image = CACHE / "initramfs"
    image.write_bytes(archive(files))
    return GuestImage(kernel.image, image)


def archive(files: dict[str, bytes]) -> bytes:
    """A cpio archive in the format ``newc``, as the kernel reads it. It is not compressed: an emulated processor takes
    longer to unpack than the emulator to load."""
    folders = {str(folder) for name in files for folder in Path(name).parents if folder != Path(".")}
    parts = [_entry(folder, stat.S_IFDIR | 0o755, b"") for folder in sorted(folders | {"proc", "sys", "dev"})]
    parts += [_entry(name, stat.S_IFREG | 0o755, content) for name, content in files.items()]
    parts.append(_entry("TRAILER!!!", 0, b""))
    return b"".join(parts)


def _entry(name: str, mode: int, content: bytes) -> bytes:
    encoded = name.encode() + b"\0"
    links, no_time, no_device = 1, 0, (0, 0, 0, 0)
    fields = (0, mode, 0, 0, links, no_time, len(content), *no_device, len(encoded), 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + encoded
    return _padded(head) + _padded(content)


def _padded(part: bytes) -> bytes:
    return part + b"\0" * (-len(part) % 4)


def _files(kernel: GuestKernel, program: Path) -> Iterator[tuple[str, bytes]]:
    yield "init", INIT.encode()
    for module in kernel.modules:
        yield f"modules/{module.name}", module.read_bytes()
    yield program.name, program.read_bytes()
    ours = ROOT / "eep" / "lib" / "libeep_cpu.so"
    yield ours.name, ours.read_bytes()
    # The driver is the name of a library, which libibverbs loads from a folder of its own.
    (driver,) = (LIBRARIES / "libibverbs").glob("librxe-*.so")
    installed = {BUSYBOX, RDMA, DRIVER, driver, LIBRARIES / "libfabric.so.1"}
    for path in [program, ours, *sorted(installed - {DRIVER})]:
        installed |= _needed_libraries(path)
    for path in sorted(installed):
        yield str(path).lstrip("/"), path.read_bytes()


def _needed_libraries(path: Path) -> set[Path]:
    """Those of the system, under the names at which the loader looks for them. None for what is linked statically."""
    answer = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
    words = {word for line in answer.splitlines() for word in line.split()}
    return {Path(word) for word in words if word.startswith("/") and ROOT not in Path(word).parents}


def _build_program() -> Path:
    program = CACHE / "guest_rank"
    source = Path(__file__).with_name("guest_rank.cpp")
    flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'eep_cuda' / 'include'}"]
    # In a guest, the library lies beside the program, at the root.
    link = [f"-L{ROOT / 'eep' / 'lib'}", "-leep_cpu", "-Wl,-rpath,/"]
    subprocess.run(["c++", *flags, source, "-o", program, *link], check=True, timeout=300)
    return program
