"""Records of host links in a store: what is published, what is followed, and what is not believed."""

from __future__ import annotations

import asyncio

import pytest

from eep.control.links.host_records import HostRecord, HostRecords, decode_host_record
from eep.control.store.embedded_store import EmbeddedStore
from eep.control.store.key_value import ABSENT
from eep.control.store.record_codec import RecordError
from eep.control.supervisor.settings import LinkSettings

A, B = HostRecord("a#1", "10.0.0.1", 7001), HostRecord("b#1", "10.0.0.2", 7002)
KEY = bytes(32)


def test_each_host_follows_the_records_of_the_others_until_their_leases_end() -> None:
    async def body() -> None:
        store = EmbeddedStore()
        known: dict[str, dict[str, HostRecord]] = {"a": {}, "b": {}}
        ends = {
            name: HostRecords(store, record, lambda seen, name=name: known.update({name: dict(seen)}), print)  # type: ignore[misc]
            for name, record in (("a", A), ("b", B))
        }
        leases = {name: await store.grant(60.0) for name in ends}
        for name, end in ends.items():
            end.lease_changed(leases[name])
        async with asyncio.timeout(30):
            while known != {"a": {"b#1": B}, "b": {"a#1": A}}:
                await asyncio.sleep(0.005)
            await store.end_lease(leases["b"])
            while known["a"]:
                await asyncio.sleep(0.005)
        for end in ends.values():
            await end.stop()

    asyncio.run(body())


def test_what_is_no_record_is_refused_and_the_others_are_followed() -> None:
    async def body() -> None:
        store, seen, rejected = EmbeddedStore(), {}, []
        await store.compare_and_swap("link/c/", ABSENT, b"{}")
        await store.compare_and_swap("link/b/", ABSENT, b'{"ident":"b#1","address":"10.0.0.2","port":7002}')
        records = HostRecords(store, A, seen.update, lambda kind, reason: rejected.append(kind))
        async with asyncio.timeout(30):
            while not seen:
                await asyncio.sleep(0.005)
        assert (seen, rejected) == ({"b#1": B}, ["bad-record"])
        await records.stop()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("link/a/", b'{"ident":"b#1","address":"10.0.0.2","port":7002}'),
        ("link/b/", b'{"ident":"b#1","address":"0.0.0.0","port":7002}'),
        ("link/b/", b'{"ident":"b#1","address":"224.0.0.1","port":7002}'),
        ("link/b/", b'{"ident":"b#1","address":"host-b.example","port":7002}'),
        ("link/b/", b'{"ident":"b#1","address":"10.0.0.2","port":0}'),
        ("link/b/", b'{"ident":"b#1","address":"10.0.0.2","port":7002,"more":1}'),
        ("link/b/", b"\xff"),
    ],
)
def test_a_record_that_cannot_be_is_refused(key: str, value: bytes) -> None:
    with pytest.raises(RecordError):
        decode_host_record(key, value)


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::", "host-a", "*"])
def test_links_are_bound_to_one_address_in_numbers(address: str) -> None:
    with pytest.raises(ValueError, match="name the address of this host"):
        LinkSettings(address, KEY)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="the key of the job must have 32 bytes"):
        LinkSettings("10.0.0.1", b"short")
    with pytest.raises(ValueError, match="at least 5 heartbeats"):
        LinkSettings("10.0.0.1", KEY, host_timeout_s=0.4)
    with pytest.raises(ValueError, match="a port is a number"):
        LinkSettings("10.0.0.1", KEY, port=70000)
