"""A guest: an emulated machine with one rank, and the serial port over which a test talks to it."""

from __future__ import annotations

import platform
import queue
import subprocess
import threading
from pathlib import Path

from tests.rdma.guest_image import GuestImage

# Old processors with few features: emulation is faster without.
MACHINES = {
    "x86_64": ("qemu-system-x86_64", "-machine", "q35", "-cpu", "Nehalem"),
    "aarch64": ("qemu-system-aarch64", "-machine", "virt", "-cpu", "cortex-a72"),
}
CONSOLES = {"x86_64": "ttyS0", "aarch64": "ttyAMA0"}
FASTER = "mitigations=off nokaslr audit=0 no_timer_check"
BOOT_WITHIN = 300.0
ANSWER_WITHIN = 120.0


def emulator() -> str:
    """The program that emulates a machine like this one."""
    return MACHINES[platform.machine()][0]


class GuestTrouble(Exception):
    """A guest that ended, refused a command, or did not answer in time; with the end of what its kernel said."""


class Guest:
    """One life of a rank. All guests of a test are in one directory, where their network is. A guest ends by itself when the
    test at the other end of its port has ended."""

    def __init__(self, image: GuestImage, directory: Path, rank: int, incarnation: int) -> None:
        self.rank, self.incarnation = rank, incarnation
        self._log = directory / f"console-{rank}.{incarnation}"
        self._lines: queue.Queue[str | None] = queue.Queue()
        wire = directory / f"wire-{rank}"
        wire.unlink(missing_ok=True)
        # Names in the current directory: an address of a socket may have only about a hundred characters.
        command = [
            *MACHINES[platform.machine()],
            *("-accel", "tcg", "-smp", "1", "-m", "512", "-nodefaults", "-no-user-config", "-no-reboot"),
            *("-display", "none", "-serial", f"file:{self._log.name}"),
            *("-kernel", str(image.kernel), "-initrd", str(image.files), "-append", self._kernel_arguments()),
            *("-netdev", _wire(rank), "-device", f"virtio-net-pci,netdev=wire,romfile=,mac=52:54:00:00:00:0{rank + 1}"),
            *("-chardev", "stdio,id=talk,signal=off", "-device", "virtio-serial-pci"),
            *("-device", "virtserialport,chardev=talk"),
        ]
        self._process = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        threading.Thread(target=self._read, name=f"guest-{rank}.{incarnation}", daemon=True).start()

    def wait_until_ready(self) -> None:
        self.expect("ready", BOOT_WITHIN)

    def say(self, *words: object) -> None:
        assert self._process.stdin
        try:
            print(*words, file=self._process.stdin, flush=True)
        except OSError as error:
            raise self._trouble(f"takes no commands: {error}") from error

    def expect(self, first: str, within: float = ANSWER_WITHIN) -> str:
        """The next line, which must begin so; what comes after that."""
        line = self.next_line(within)
        if not line.startswith(first):
            raise self._trouble(f"said {line!r} instead of {first!r}")
        return line[len(first) :].strip()

    def next_line(self, within: float = ANSWER_WITHIN) -> str:
        try:
            line = self._lines.get(timeout=within)
        except queue.Empty:
            raise self._trouble(f"said nothing for {within:.0f} s") from None
        if line is None:
            raise self._trouble("has ended")
        return line

    def kill(self) -> None:
        """Its processor, memory and network end at once, as by a loss of power."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout
        with self._process.stdout as stream:
            for line in stream:
                self._lines.put(line.strip())
        self._lines.put(None)

    def _kernel_arguments(self) -> str:
        """Words with ``=`` that the kernel does not know are environment of its first process."""
        settings = f"RANK={self.rank} INCARNATION={self.incarnation} ADDRESS=10.7.0.{self.rank + 1}"
        return f"console={CONSOLES[platform.machine()]} loglevel=4 panic=-1 {FASTER} {settings}"

    def _trouble(self, what: str) -> GuestTrouble:
        said = self._log.read_text(errors="replace")[-3000:] if self._log.exists() else ""
        return GuestTrouble(f"the guest of rank {self.rank}, incarnation {self.incarnation}, {what}\n{said}")


def _wire(rank: int) -> str:
    """One end of a cable: datagrams, so that an end can go and another take its place."""
    own, other = f"wire-{rank}", f"wire-{1 - rank}"
    return f"dgram,id=wire,local.type=unix,local.path={own},remote.type=unix,remote.path={other}"
