"""SGLang on several hosts, each with a server of its own; etcd and the clients on a further one.

A host is a network namespace. Where those cannot be had, it is an address of the loopback network: then no link can be cut.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.common import network_namespaces
from eep.abi import native
from eep.abi.link import NativeTransport
from eep.drill.devices import CPU, Device
from eep.drill.sglang_server import START_WITHIN, Server
from eep.errors import EepError

RANKS_EACH = 2
_PATIENT = ("--eep-timeout-ms", "20000")
_STARTS_WITHIN = 60.0


def why_not() -> str | None:
    """Why there can be no hosts in namespaces here, or None."""
    return why_not_on_loopback() or network_namespaces.why_not()


def why_not_on_loopback() -> str | None:
    """Why there can be no hosts that are addresses here, or None."""
    if shutil.which("etcd") is None:
        return "etcd is not installed (apt-get install etcd-server)"
    try:
        NativeTransport(native.load(), "tcp", "127.0.0.1").close()
    except EepError as error:
        return str(error)
    return None


class InstanceServers(ABC):
    """``servers[k]``: that of host ``k``. Make it, and use the servers, in :meth:`among_clients`. ``later``: how many hosts
    may be added."""

    def __init__(
        self,
        model: Path,
        place: Path,
        hosts: int,
        arguments: tuple[str, ...],
        later: int = 0,
        device: Device = CPU,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._model, self._place, self.hosts = model, place, hosts
        self._device, self._environment = device, dict(environment or {})
        self._clients = most = hosts + later
        self._arguments = (*(("--eep-max-ranks", str(most * RANKS_EACH)) if later else ()), *arguments)
        self._etcd: subprocess.Popen[bytes] | None = None
        self._key = place / "key"
        self._key.write_bytes(os.urandom(32))
        self._key.chmod(0o600)
        self._lives = [0] * most
        self.servers: list[Server] = []
        try:
            self._start_etcd()
            self.servers = [self._server(host) for host in range(hosts)]
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def address(self, host: int) -> str:
        """Of a host, or of the clients and the store, which are behind the last host."""

    @abstractmethod
    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """The command that runs another one there."""

    @abstractmethod
    def among_clients(self) -> contextlib.AbstractContextManager[None]:
        """This thread, and those that it starts meanwhile, are where clients are."""

    @property
    def store(self) -> str:
        return f"http://{self.address(self._clients)}:2379"

    def start(self) -> None:
        """All of them at once: none is ready before the ranks of all hosts are. They share the cores of one machine, so
        they may take longer than one alone."""
        for server in self.servers:
            server.launch()
        for server in self.servers:
            server.wait_until_it_answers(self.hosts * START_WITHIN)

    def start_again(self, host: int) -> None:
        """A host that was lost is back. Its server starts anew, beside one that serves."""
        self.servers[host] = self._server(host)
        self.servers[host].launch()
        self.servers[host].wait_until_it_answers(self.hosts * START_WITHIN)

    def add(self) -> int:
        """A host that was not there before joins those that serve. Its number."""
        host = len(self.servers)
        self.servers.append(self._server(host))
        self.servers[host].launch()
        self.servers[host].wait_until_it_answers(self.hosts * START_WITHIN)
        return host

    def log(self, host: int) -> str:
        return self.servers[host].log

    def _server(self, host: int) -> Server:
        self._lives[host] += 1
        name = f"host{host}.{self._lives[host]}"
        ranks = str(self.hosts * RANKS_EACH)
        flags = (
            *(
                "--tp-size",
                ranks,
                "--dp-size",
                ranks,
                "--ep-size",
                ranks,
                "--enable-dp-attention",
                "--ep-backend",
                "eep",
            ),
            *("--nnodes", str(self.hosts), "--node-rank", str(host), "--eep-instance", "test"),
            *("--eep-address", self.address(host), "--eep-key-file", str(self._key), "--eep-store", self.store),
            *_PATIENT,
            *self._arguments,
        )
        return Server(
            self._model,
            flags,
            self._place / f"{name}.log",
            self._environment,
            self._place / name,
            self._device,
            self.address(host),
            self.command(host, ()),
        )

    def _start_etcd(self) -> None:
        client, peer = (f"http://{self.address(self._clients)}:{port}" for port in (2379, 2380))
        options = {
            "data-dir": str(self._place / "etcd"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "log-level": "error",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        with (self._place / "etcd.log").open("wb") as log:
            self._etcd = subprocess.Popen(
                self.command(self._clients, ["etcd", *arguments]),
                stdout=log,
                stderr=log,
                env={**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"},
            )
        with self.among_clients():
            end = time.monotonic() + _STARTS_WITHIN
            while not _answers(f"{client}/health"):
                assert time.monotonic() < end, "etcd did not come up"
                time.sleep(0.05)

    def close(self) -> None:
        """Ends what runs, however it stands."""
        for server in self.servers:
            with contextlib.suppress(AttributeError):  # it was never launched
                server.kill()
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()


class HostServers(InstanceServers):
    """On a CPU, in network namespaces."""

    def __init__(
        self, model: Path, place: Path, hosts: int = 2, arguments: tuple[str, ...] = (), later: int = 0
    ) -> None:
        self.network = network_namespaces.Network(hosts + later + 1)
        super().__init__(model, place, hosts, arguments, later)

    def address(self, host: int) -> str:
        return self.network.address(host)

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        return self.network.command(host, arguments)

    def among_clients(self) -> contextlib.AbstractContextManager[None]:
        return network_namespaces.entered(self.network.namespace(self._clients))

    def close(self) -> None:
        super().close()
        self.network.close()


class LoopbackServers(InstanceServers):
    """On any device, at addresses of the loopback network."""

    def address(self, host: int) -> str:
        return f"127.0.0.{host + 2}"

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        return list(arguments)

    def among_clients(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@contextlib.contextmanager
def running(
    model: Path, place: Path, hosts: int = 2, arguments: tuple[str, ...] = (), later: int = 0
) -> Iterator[HostServers]:
    """Servers that answer. The caller is among the clients meanwhile."""
    servers = HostServers(model, place, hosts, arguments, later)
    with _answering(servers):
        yield servers


@contextlib.contextmanager
def running_on_loopback(
    model: Path, place: Path, device: Device, environment: Mapping[str, str], arguments: tuple[str, ...] = ()
) -> Iterator[LoopbackServers]:
    """Two hosts that answer."""
    servers = LoopbackServers(model, place, 2, arguments, device=device, environment=environment)
    with _answering(servers):
        yield servers


@contextlib.contextmanager
def _answering(servers: InstanceServers) -> Iterator[None]:
    try:
        with servers.among_clients():
            servers.start()
            yield
    finally:
        servers.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False
