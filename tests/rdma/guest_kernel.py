"""The kernel of a guest: Debian's, with the modules that a guest loads. It is unpacked into a cache and never installed.

The package of the kernel has no ``modules.dep``, which ``depmod`` makes when a kernel is installed. So what a module needs
is read from the module itself.
"""

from __future__ import annotations

import lzma
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

META_PACKAGES = {"x86_64": "linux-image-amd64", "aarch64": "linux-image-arm64"}
WANTED = (
    "virtio_pci",
    "virtio_console",
    "virtio_net",
    "crc32_generic",  # rdma_rxe asks for it by name when a device is made, not as a dependency
    "rdma_rxe",
    "ib_uverbs",
    "rdma_ucm",
)
"""A kernel may have some of these built in."""


@dataclass(frozen=True, slots=True)
class GuestKernel:
    image: Path
    modules: tuple[Path, ...]
    """In the order in which they are to be loaded."""


def fetch_kernel(cache: Path) -> GuestKernel:
    """The kernel for guests of this machine's architecture. It is fetched with apt when the cache does not have it."""
    package = _kernel_package()
    kept = cache / package
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=cache) as place:
            _keep_kernel(package, Path(place), kept)
    return GuestKernel(kept / "vmlinuz", tuple(sorted(kept.glob("*.ko"))))


def load_order(wanted: Iterable[str], needs: Callable[[str], Iterable[str]]) -> list[str]:
    """``wanted`` and all that they need, each after what it needs itself."""
    order: list[str] = []

    def add(name: str) -> None:
        if name not in order:
            for needed in needs(name):
                add(needed)
            order.append(name)

    for name in wanted:
        add(name)
    return order


def needed_modules(module: bytes) -> list[str]:
    """What a module says that it needs: a field of its section ``.modinfo``, whose fields end with a zero byte."""
    _, found, rest = module.partition(b"\0depends=")
    names = rest.partition(b"\0")[0].decode() if found else ""
    return [_module_name(name) for name in names.split(",") if name]


def _kernel_package() -> str:
    meta = META_PACKAGES[platform.machine()]
    answer = subprocess.run(["apt-cache", "depends", meta], capture_output=True, text=True, check=True).stdout
    for line in answer.splitlines():
        relation, _, package = line.strip().partition(": ")
        if relation == "Depends" and package.startswith("linux-image-"):
            return package
    raise LookupError(f"apt knows no kernel that {meta} depends on; run apt-get update")


def _keep_kernel(package: str, place: Path, kept: Path) -> None:
    subprocess.run(["apt-get", "download", "-q", package], cwd=place, check=True, timeout=600)
    (archive,) = place.glob("*.deb")
    subprocess.run(["dpkg", "-x", archive, place / "all"], check=True, timeout=600)
    result = place / "kept"
    result.mkdir()
    (image,) = (place / "all" / "boot").glob("vmlinu*")
    shutil.copy(image, result / "vmlinuz")
    files = {_module_name(path.name): path for path in _module_files(place / "all")}
    contents: dict[str, bytes] = {}

    def needs(name: str) -> list[str]:
        contents[name] = _content(files[name])
        return [needed for needed in needed_modules(contents[name]) if needed in files]

    for number, name in enumerate(load_order((each for each in WANTED if each in files), needs)):
        (result / f"{number:02}-{name}.ko").write_bytes(contents[name])
    result.rename(kept)


def _module_files(place: Path) -> Iterator[Path]:
    yield from place.glob("**/lib/modules/*/kernel/**/*.ko")
    yield from place.glob("**/lib/modules/*/kernel/**/*.ko.xz")


def _module_name(file_name: str) -> str:
    return file_name.partition(".")[0].replace("-", "_")


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    return lzma.decompress(content) if path.suffix == ".xz" else content
