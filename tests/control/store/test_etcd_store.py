"""What only etcd has: nodes that die or hang, passwords, certificates. And hosts that agree all the while."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from eep.control.store.embedded_store import StoreError
from eep.control.store.etcd_gateway import StoreRefusal
from eep.control.store.etcd_store import EtcdStore
from eep.control.store.key_value import ABSENT
from eep.control.store.record_seal import RecordSeal
from eep.control.supervisor.supervisor import Supervisor
from eep.control.wire.sealed_frames import new_key
from eep.membership import Phase
from tests.control import ranks
from tests.control.harness import PATIENCE, kill, record, runs_with, supervised, until
from tests.control.store.etcd_cluster import EtcdCluster, why_not

ALL = (0, 1, 2, 3)


@asynccontextmanager
async def two_hosts(etcd: EtcdCluster, job: str) -> AsyncIterator[tuple[Supervisor, Supervisor]]:
    """Hosts a and b with two ranks each, joined by etcd and the key of their job."""
    seal = RecordSeal(new_key())
    async with AsyncExitStack() as stack:
        hosts = [
            await stack.enter_async_context(
                supervised(
                    ranks.steady,
                    members,
                    max_ranks=4,
                    host=name,
                    store=EtcdStore(etcd.endpoints, job, seal=seal, answer_within=5.0),
                    lease_ttl=60.0,
                )
            )
            for name, members in (("a", (0, 1)), ("b", (2, 3)))
        ]
        for host in hosts:
            await until(host, runs_with(host, ALL))
        yield hosts[0], hosts[1]


async def every_rank_back(*hosts: Supervisor) -> None:
    """Every rank is in and running, and all hosts hold the same record."""
    async with asyncio.timeout(PATIENCE):
        while True:
            for host in hosts:
                await until(host, runs_with(host, ALL))
            if len({record(host).serial for host in hosts}) == 1:
                break
            await asyncio.sleep(0.02)
    assert record(hosts[0]) == record(hosts[1])


def test_two_hosts_agree_on_every_loss(etcd: EtcdCluster) -> None:
    async def body() -> None:
        async with two_hosts(etcd, "losses") as (a, b):
            for host, rank in ((a, 0), (b, 3), (b, 2)):
                before = record(host).view.incarnations[rank]
                kill(host, rank)
                await until(a, lambda rank=rank, n=before: record(a).view.incarnations[rank] > n)  # type: ignore[misc]
                await every_rank_back(a, b)

    asyncio.run(body())


def test_a_host_that_stops_is_taken_out_at_once_and_another_coordinates(etcd: EtcdCluster) -> None:
    async def body() -> None:
        async with two_hosts(etcd, "stops") as (a, b):
            first, second = (a, b) if record(a).coordinator == a.ident else (b, a)
            await first.stop()
            await until(second, lambda: record(second).coordinator == second.ident)
            await until(second, runs_with(second, tuple(second.state.ranks)))

    asyncio.run(body())


def test_a_node_is_killed_and_another_paused_during_view_changes(etcd: EtcdCluster) -> None:
    async def body() -> None:
        async with two_hosts(etcd, "nodes") as (a, b):
            leader = etcd.leader()
            kill(a, 1)
            etcd.kill(leader)
            await until(b, lambda: record(b).view.incarnations[1] > 0)
            await every_rank_back(a, b)
            etcd.start(leader)
            etcd.wait_until_healthy()

            paused = etcd.leader()
            etcd.pause(paused)
            kill(b, 2)
            await until(a, lambda: record(a).view.incarnations[2] > 0)
            await every_rank_back(a, b)
            etcd.resume(paused)
            etcd.wait_until_healthy()
            kill(a, 0)
            await until(b, lambda: record(b).view.incarnations[0] > 0)
            await every_rank_back(a, b)
            assert record(a).phase is Phase.RUN

    asyncio.run(body())


def patient(endpoints: Sequence[str], job: str, **options: Any) -> EtcdStore:
    """For where no host is lost: a disk that is busy may take seconds to write."""
    return EtcdStore(endpoints, job, answer_within=PATIENCE, **options)


def test_without_a_majority_nothing_is_answered(etcd: EtcdCluster) -> None:
    async def body() -> None:
        swap = await patient(etcd.endpoints, "majority").compare_and_swap("k", ABSENT, b"before")
        assert swap.entry is not None
        store = EtcdStore(etcd.endpoints, "majority", answer_within=2.0)
        etcd.pause(0)
        etcd.pause(1)
        try:
            for _ in range(3):
                with pytest.raises(StoreError):
                    await store.compare_and_swap("k", swap.entry.version, b"lost")
                with pytest.raises(StoreError):
                    await store.get("k")
        finally:
            etcd.resume(0)
            etcd.resume(1)
        etcd.wait_until_healthy()

    asyncio.run(body())


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        EtcdStore((), "x")
    with pytest.raises(ValueError, match="both a user and a password"):
        EtcdStore(("http://127.0.0.1:1",), "x", user="root")


def test_a_node_that_is_not_there_is_an_error_that_says_so() -> None:
    with pytest.raises(StoreError, match="cannot be reached"):
        asyncio.run(EtcdStore(("http://127.0.0.1:9",), "x").get("k"))


def test_calls_that_fail_together_leave_the_node_they_asked_and_no_other(etcd: EtcdCluster) -> None:
    """As many calls as there are nodes: were each to move on by one, they would be back where they started."""

    async def body() -> None:
        store = patient(("http://127.0.0.1:9", *etcd.endpoints[:2]), "together")
        failed = await asyncio.gather(*(store.get("k") for _ in range(3)), return_exceptions=True)
        assert all(isinstance(error, StoreError) for error in failed), failed
        assert await store.get("k") is None

    asyncio.run(body())


def admin(endpoint: str, path: str, body: object) -> None:
    data = json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/v3/{path}", data), timeout=30) as answer:
        answer.read()


def add_root(endpoint: str) -> None:
    admin(endpoint, "auth/user/add", {"name": "root", "password": "secret"})
    admin(endpoint, "auth/role/add", {"name": "root"})
    admin(endpoint, "auth/user/grant", {"user": "root", "role": "root"})
    admin(endpoint, "auth/enable", {})


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_user_and_password(tmp_path: Path) -> None:
    cluster = EtcdCluster(tmp_path, nodes=1)
    try:
        (endpoint,) = cluster.endpoints
        add_root(endpoint)

        async def body() -> None:
            for credentials in ({}, {"user": "root", "password": "wrong"}):
                with pytest.raises(StoreRefusal) as caught:
                    await patient((endpoint,), "x", **credentials).get("k")
                assert caught.value.cause == "password"
            store = patient((endpoint,), "x", user="root", password="secret")
            assert (await store.compare_and_swap("k", ABSENT, b"v")).done
            watch = store.watch("k")
            await anext(watch)
            store._gateway._token = "made up"
            with pytest.raises(StoreError, match="auth token"):
                await store.get("k")
            assert await store.get("k") is not None, "a new token was not fetched"
            await watch.aclose()

        asyncio.run(body())
    finally:
        cluster.close()


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_change_of_users_ends_signed_tokens_and_a_new_one_is_fetched(tmp_path: Path) -> None:
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    subprocess.run(["openssl", "genrsa", "-out", str(private), "2048"], check=True, capture_output=True)
    subprocess.run(
        ["openssl", "rsa", "-in", str(private), "-pubout", "-out", str(public)], check=True, capture_output=True
    )
    signed = f"jwt,pub-key={public},priv-key={private},sign-method=RS256"
    cluster = EtcdCluster(tmp_path, nodes=1, options=("--auth-token", signed))
    try:
        (endpoint,) = cluster.endpoints
        add_root(endpoint)

        async def body() -> None:
            store, other = (patient((endpoint,), "x", user="root", password="secret") for _ in range(2))
            assert await store.get("k") is None
            await other._gateway.call("auth/user/add", {"name": "another", "password": "secret"})
            with pytest.raises(StoreError):
                await store.get("k")
            assert await store.get("k") is None, "a new token was not fetched"

        asyncio.run(body())
    finally:
        cluster.close()


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_certificates(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=etcd"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    options = ("--cert-file", str(certificate), "--key-file", str(key))
    trusting = ssl.create_default_context(cafile=str(certificate))
    cluster = EtcdCluster(tmp_path, nodes=1, tls=options, trust=trusting)

    async def body() -> None:
        store = patient(cluster.endpoints, "x", tls=trusting)
        assert (await store.compare_and_swap("k", ABSENT, b"v")).done
        with pytest.raises(StoreRefusal, match="is not trusted") as caught:
            await patient(cluster.endpoints, "x").get("k")
        assert caught.value.cause == "certificate"

    try:
        asyncio.run(body())
    finally:
        cluster.close()
