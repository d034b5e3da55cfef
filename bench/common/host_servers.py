"""SGLang on several hosts: each in a network namespace, with a server of its own; etcd and the clients on a further one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from bench.common import network_namespaces
from eep.abi import native
from eep.abi.link import NativeTransport
from eep.drill.sglang_server import START_WITHIN, Server
from eep.errors import EepError

RANKS_EACH = 2
_PATIENT = ("--eep-timeout-ms", "20000")
_STARTS_WITHIN = 60.0


def why_not() -> str | None:
    """Why there can be no such hosts here, or None."""
    if shutil.which("etcd") is None:
        return "etcd is not installed (apt-get install etcd-server)"
    try:
        NativeTransport(native.load(), "tcp", "127.0.0.1").close()
    except EepError as error:
        return str(error)
    return network_namespaces.why_not()


class HostServers:
    """``servers[k]``: that of host ``k``. Make it, and use the servers, in :meth:`among_clients`. ``later``: how many hosts
    may be added."""

    def __init__(
        self, model: Path, place: Path, hosts: int = 2, arguments: tuple[str, ...] = (), later: int = 0
    ) -> None:
        self._model, self._place, self.hosts = model, place, hosts
        self._clients = most = hosts + later
        self._arguments = (*(("--eep-max-ranks", str(most * RANKS_EACH)) if later else ()), *arguments)
        self.network = network_namespaces.Network(most + 1)
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

    @property
    def store(self) -> str:
        return f"http://{self.network.address(self._clients)}:2379"

    def among_clients(self) -> contextlib.AbstractContextManager[None]:
        """This thread, and those that it starts meanwhile, are where clients are."""
        return network_namespaces.entered(self.network.namespace(self._clients))

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
            *("--eep-address", self.network.address(host), "--eep-key-file", str(self._key), "--eep-store", self.store),
            *_PATIENT,
            *self._arguments,
        )
        return Server(
            self._model,
            flags,
            self._place / f"{name}.log",
            directory=self._place / name,
            host=self.network.address(host),
            within=self.network.command(host, ()),
        )

    def _start_etcd(self) -> None:
        client, peer = (f"http://{self.network.address(self._clients)}:{port}" for port in (2379, 2380))
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
                self.network.command(self._clients, ["etcd", *arguments]),
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
        self.network.close()


@contextlib.contextmanager
def running(
    model: Path, place: Path, hosts: int = 2, arguments: tuple[str, ...] = (), later: int = 0
) -> Iterator[HostServers]:
    """Servers that answer. The caller is among the clients meanwhile."""
    servers = HostServers(model, place, hosts, arguments, later)
    try:
        with servers.among_clients():
            servers.start()
            yield servers
    finally:
        servers.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False
