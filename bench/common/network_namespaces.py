"""Hosts on one machine: a network namespace each, joined by a bridge in a namespace of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

SUBNET = "10.231.77"
_CLONE_NEWNET = 0x40000000


def why_not() -> str | None:
    """Why there can be no namespaces here, or None. Tries, because being root is not always enough."""
    if shutil.which("ip") is None:
        return "the ip command is not installed (apt-get install iproute2)"
    name = f"eep{os.getpid()}-try"
    for command in (("netns", "add", name), ("-n", name, "link", "add", "br0", "type", "bridge")):
        done = subprocess.run(["ip", *command], capture_output=True, text=True)
        if done.returncode != 0:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            return f"network namespaces are not permitted here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None


class Network:
    """``hosts`` namespaces with addresses that reach each other, until told otherwise."""

    def __init__(self, hosts: int) -> None:
        self._name = f"eep{os.getpid()}"
        self._hosts = hosts
        self._switch = f"{self._name}-sw"
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for host in range(self._hosts):
            space, port = self.namespace(host), f"p{host}"
            _ip("netns", "add", space)
            _ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", self._switch)
            _ip("-n", self._switch, "link", "set", port, "master", "br0")
            _ip("-n", self._switch, "link", "set", port, "up")
            _ip("-n", space, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", space, "link", "set", link, "up")

    def namespace(self, host: int) -> str:
        return f"{self._name}-{host}"

    def address(self, host: int) -> str:
        return f"{SUBNET}.{host + 1}"

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """The command that runs another one on a host."""
        return ["ip", "netns", "exec", self.namespace(host), *arguments]

    def cut(self, source: int, target: int) -> None:
        """From now on nothing that ``source`` sends reaches ``target``; the other way is left as it is."""
        _ip("-n", self.namespace(source), "route", "replace", "blackhole", f"{self.address(target)}/32")

    def isolate(self, host: int, *, both_ways: bool) -> None:
        for other in range(self._hosts):
            if other != host:
                self.cut(host, other)
                if both_ways:
                    self.cut(other, host)

    def heal(self) -> None:
        for source in range(self._hosts):
            for target in range(self._hosts):
                route = ("route", "del", "blackhole", f"{self.address(target)}/32")
                subprocess.run(["ip", "-n", self.namespace(source), *route], capture_output=True)

    def close(self) -> None:
        for space in [self._switch, *[self.namespace(host) for host in range(self._hosts)]]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def enter(namespace: str) -> None:
    """Puts this thread, and those that it starts, on a host."""
    with open(f"/run/netns/{namespace}") as file:
        _switch_to(file.fileno(), namespace)


def _switch_to(descriptor: int, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


@contextlib.contextmanager
def entered(namespace: str) -> Iterator[None]:
    """This thread, and those that it starts meanwhile, are on a host."""
    with open("/proc/thread-self/ns/net") as before:
        enter(namespace)
        try:
            yield
        finally:
            _switch_to(before.fileno(), "the one before")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
