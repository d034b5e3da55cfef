"""A neighbour that can write to our etcd and does not have the job's key: what it writes is never read, and ours is put
back."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.request
from base64 import b64decode, b64encode
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from eep.control.store.embedded_store import Listing, StoreError
from eep.control.store.etcd_store import EtcdStore
from eep.control.store.key_value import ABSENT, Change, StoredValue
from eep.control.store.record_codec import encode_record
from eep.control.store.record_seal import RecordSeal
from eep.control.supervisor.supervisor import Supervisor
from eep.control.wire.sealed_frames import new_key
from eep.membership import InstanceRecord
from tests.control import ranks
from tests.control.harness import PATIENCE, kill, record, runs_with, supervised, until
from tests.control.store.etcd_cluster import EtcdCluster

SEAL = RecordSeal(new_key())


class Neighbour:
    """Another client of etcd, with every right."""

    def __init__(self, etcd: EtcdCluster) -> None:
        self._endpoint = etcd.endpoints[0]

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(f"{self._endpoint}/v3/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return dict(json.load(answer))

    def put(self, name: str | bytes, value: bytes) -> None:
        self.ask("kv/put", key=encoded(name), value=encoded(value))

    def read(self, name: str) -> bytes:
        (kv,) = self.ask("kv/range", key=encoded(name))["kvs"]
        return b64decode(kv["value"])


def encoded(raw: str | bytes) -> str:
    return b64encode(raw.encode() if isinstance(raw, str) else raw).decode()


@pytest.fixture
def neighbour(etcd: EtcdCluster) -> Neighbour:
    return Neighbour(etcd)


def sealed(etcd: EtcdCluster, job: str) -> EtcdStore:
    return EtcdStore(etcd.endpoints[:1], job, seal=SEAL, answer_within=PATIENCE, listen_for=PATIENCE)


async def written(store: EtcdStore, key: str, value: bytes, lease: int | None = None) -> StoredValue[bytes]:
    swap = await store.compare_and_swap(key, ABSENT, value, lease)
    assert swap.done
    assert swap.entry is not None
    return swap.entry


def test_a_value_that_others_replaced_is_put_back(
    etcd: EtcdCluster, neighbour: Neighbour, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        store = sealed(etcd, "put-back")
        first = await written(store, "k", b"ours")
        for _ in range(3):
            neighbour.put("/eep/put-back/k", b"theirs")
        found = await store.get("k")
        assert found is not None
        assert found.value == b"ours"
        assert SEAL.open("/eep/put-back/k", neighbour.read("/eep/put-back/k")) == b"ours"
        assert not (await store.compare_and_swap("k", first.version, b"late")).done
        neighbour.put("/eep/put-back/k", b"theirs")
        swap = await store.compare_and_swap("k", found.version, b"next")
        assert not swap.done
        assert swap.entry is not None
        assert swap.entry.value == b"ours"
        assert (await store.compare_and_swap("k", swap.entry.version, b"next")).done

    with caplog.at_level(logging.ERROR):
        asyncio.run(body())
    (said,) = caplog.messages
    assert "another client of etcd wrote to '/eep/put-back/k', without the key of this job" in said
    assert "only this server's user a right to write" in said


def test_a_watch_tells_what_is_ours_and_nothing_else(etcd: EtcdCluster, neighbour: Neighbour) -> None:
    async def body() -> None:
        store = sealed(etcd, "watched")
        entry = await written(store, "a/1", b"ours")
        neighbour.put(b"/eep/watched/a/\xff", b"a name that is no text")
        watch = store.watch("a/")
        listing = await anext(watch)
        assert isinstance(listing, Listing)
        assert listing.entries == {"a/1": entry}
        neighbour.put("/eep/watched/a/1", b"theirs")
        neighbour.put("/eep/watched/a/2", b"theirs")
        change = await anext(watch)
        assert isinstance(change, Change)
        assert (change.key, change.value) == ("a/1", b"ours"), "put back by the watch itself"
        assert (await store.compare_and_swap("a/1", change.version, b"next")).done
        change = await anext(watch)
        assert (change.key, change.value) == ("a/1", b"next")  # type: ignore[union-attr]
        await watch.aclose()

    asyncio.run(asyncio.wait_for(body(), PATIENCE))


def test_a_record_that_was_copied_from_elsewhere_is_not_read(etcd: EtcdCluster, neighbour: Neighbour) -> None:
    async def body() -> None:
        store, other = sealed(etcd, "copied"), sealed(etcd, "copied-from")
        await written(store, "a", b"of a")
        await written(store, "b", b"of b")
        await written(other, "a", b"of another instance")
        for source in ("/eep/copied/b", "/eep/copied-from/a"):
            neighbour.put("/eep/copied/a", neighbour.read(source))
            found = await store.get("a")
            assert found is not None
            assert found.value == b"of a"

    asyncio.run(body())


def test_a_value_that_others_replaced_ends_with_its_lease(etcd: EtcdCluster, neighbour: Neighbour) -> None:
    """What others wrote hangs on no lease: without a look, the report of a lost host would stay for ever."""

    async def body() -> None:
        store = sealed(etcd, "leased")
        lease = await store.grant(60.0)
        await written(store, "k", b"ours", lease)
        neighbour.put("/eep/leased/k", b"theirs")
        assert await store.get("k") is not None
        await store.end_lease(lease)
        assert await store.get("k") is None, "what was put back hangs on the lease again"
        lease = await store.grant(60.0)
        await written(store, "k", b"ours", lease)
        neighbour.put("/eep/leased/k", b"theirs")
        await store.end_lease(lease)
        assert await store.get("k") is None
        await written(store, "k", b"another life")

    asyncio.run(body())


def test_a_key_that_others_made_is_not_read_and_not_written(etcd: EtcdCluster, neighbour: Neighbour) -> None:
    """It may be that of a host with the key of another job, which must not lose its record."""

    async def body() -> None:
        store = sealed(etcd, "theirs")
        theirs = EtcdStore(etcd.endpoints, "theirs", seal=RecordSeal(new_key()), answer_within=PATIENCE)
        entry = await written(theirs, "k", b"theirs")
        assert await store.get("k") is None
        with pytest.raises(StoreError, match=r"without the key of this job; give all hosts of the job the same key"):
            await store.compare_and_swap("k", ABSENT, b"ours")
        assert await theirs.get("k") == entry

    asyncio.run(body())


def test_a_value_that_etcd_has_forgotten_is_missed_in_plain_words(etcd: EtcdCluster, neighbour: Neighbour) -> None:
    async def body() -> None:
        store = sealed(etcd, "compacted")
        entry = await written(store, "k", b"ours")
        neighbour.put("/eep/compacted/k", b"theirs")
        revision = neighbour.ask("kv/range", key=encoded("/eep/compacted/k"))["header"]["revision"]
        neighbour.ask("kv/compaction", revision=revision)
        assert await store.get("k") is None
        with pytest.raises(StoreError, match="without the key of this job"):
            await store.compare_and_swap("k", entry.version, b"next")

    asyncio.run(body())


def test_a_supervisor_follows_no_view_of_a_neighbour_and_goes_on(etcd: EtcdCluster, neighbour: Neighbour) -> None:
    async def body() -> None:
        store = EtcdStore(etcd.endpoints, "forged", seal=SEAL, answer_within=5.0)
        async with supervised(ranks.steady, 2, host="a", store=store, lease_ttl=60.0) as supervisor:
            await until(supervisor, runs_with(supervisor, (0, 1)))
            for rank in (0, 1):
                before = record(supervisor)
                forged = replace(before, serial=before.serial + 50, reason="forged")
                neighbour.put("/eep/forged/instance", encode_record(forged))
                neighbour.put("/eep/forged/host/a/", b"no report")
                neighbour.put("/eep/forged/host/b/", b"no report either")
                kill(supervisor, rank)
                await until(supervisor, lambda n=before, r=rank: _is_back(supervisor, n, r))  # type: ignore[misc]
                assert record(supervisor).serial < forged.serial
            assert record(supervisor).coordinator == supervisor.ident
            assert "internal" not in supervisor.journal.rejected, supervisor.journal.last_rejection

    asyncio.run(body())


def test_an_old_record_of_ours_that_is_put_back_is_not_followed(etcd: EtcdCluster, neighbour: Neighbour) -> None:
    """Its seal is good. That it is old says its serial."""

    async def body() -> None:
        store = EtcdStore(etcd.endpoints, "replayed", seal=SEAL, answer_within=5.0)
        async with supervised(ranks.steady, 2, host="a", store=store, lease_ttl=60.0) as supervisor:
            await until(supervisor, runs_with(supervisor, (0, 1)))
            old, first = neighbour.read("/eep/replayed/instance"), record(supervisor)
            kill(supervisor, 0)
            await until(supervisor, lambda: _is_back(supervisor, first, 0))
            before = record(supervisor)
            neighbour.put("/eep/replayed/instance", old)
            kill(supervisor, 1)
            await until(supervisor, lambda: supervisor.journal.rejected["store-forgot"] > 0)
            assert record(supervisor) == before
            assert neighbour.read("/eep/replayed/instance") == old, "nothing is changed until an operator looks"

    asyncio.run(body())


def _is_back(supervisor: Supervisor, before: InstanceRecord, rank: int) -> bool:
    now = record(supervisor)
    return now.view.incarnations[rank] > before.view.incarnations[rank] and runs_with(supervisor, (0, 1))()


def test_what_etcd_holds_can_be_read_by_an_operator(etcd: EtcdCluster, neighbour: Neighbour) -> None:
    async def body() -> None:
        await written(sealed(etcd, "read"), "k", msgspec.json.encode({"epoch": 3}))

    asyncio.run(body())
    head, text = neighbour.read("/eep/read/k").split(b"\n", 1)
    assert head.startswith(b"eep1 ")
    assert json.loads(text) == {"epoch": 3}
