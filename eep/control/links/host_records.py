"""Where supervisors say at which address they have their links: one record per host, in the store, under the host's lease.

No address comes from anywhere else. The store seals records with the job's key, so what others write there is not read.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Annotated

import msgspec
from msgspec import Meta

from eep.control.store.embedded_store import Listing, RecordStore, StoreError
from eep.control.store.key_value import ABSENT, LeaseEndedError
from eep.control.store.record_codec import LINK_PREFIX, RecordError, link_key
from eep.control.wire.messages import Name
from eep.membership import host_of

TRY_AGAIN_AFTER = 0.2


class HostRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ident: Name
    address: Annotated[str, Meta(max_length=64)]
    port: Annotated[int, Meta(ge=1, lt=2**16)]


_decoder = msgspec.json.Decoder(HostRecord)


def decode_host_record(key: str, value: bytes) -> HostRecord:
    try:
        record = _decoder.decode(value)
        address = ipaddress.ip_address(record.address)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise RecordError(f"what is stored as {key!r} is no record of a host link: {error}") from error
    if link_key(host_of(record.ident)) != key or address.is_unspecified or address.is_multicast:
        raise RecordError(f"the record under {key!r} names {record.ident} at {record.address}, which cannot be")
    return record


class HostRecords:
    """Publishes our record whenever there is a lease, and follows those of the others."""

    def __init__(
        self,
        store: RecordStore,
        record: HostRecord,
        follow: Callable[[Mapping[str, HostRecord]], None],
        reject: Callable[[str, str], None],
    ) -> None:
        """``follow`` gets the records of all other supervisors, by ident, whenever one changes."""
        self._store, self._record = store, record
        self._follow, self._reject = follow, reject
        self._known: dict[str, HostRecord] = {}
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        self._publishing: asyncio.Task[None] | None = None

    def lease_changed(self, lease: int | None) -> None:
        """Our record hangs on this lease from now on; None: there is none, and the record goes with the one before."""
        if self._publishing is not None:
            self._publishing.cancel()
        self._publishing = None if lease is None else asyncio.get_running_loop().create_task(self._publish(lease))

    async def stop(self) -> None:
        tasks = [task for task in (self._watching, self._publishing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _publish(self, lease: int) -> None:
        key, value = link_key(host_of(self._record.ident)), msgspec.json.encode(self._record)
        while True:
            try:
                held = await self._store.get(key)
                swap = await self._store.compare_and_swap(key, held.version if held else ABSENT, value, lease)
                if swap.done:
                    return
            except StoreError as error:
                self._reject("store-silent", str(error))
                await asyncio.sleep(TRY_AGAIN_AFTER)
            except LeaseEndedError:
                return  # another one follows

    async def _watch(self) -> None:
        while True:
            try:
                async with aclosing(self._store.watch(LINK_PREFIX)) as changes:
                    async for change in changes:
                        if isinstance(change, Listing):
                            self._known.clear()
                            for key, entry in change.entries.items():
                                self._take(key, entry.value)
                        else:
                            self._take(change.key, change.value)
                        self._follow({record.ident: record for record in self._known.values()})
            except StoreError as error:
                self._reject("store-silent", str(error))
            await asyncio.sleep(TRY_AGAIN_AFTER)

    def _take(self, key: str, value: bytes | None) -> None:
        self._known.pop(key, None)
        if value is None:
            return
        try:
            record = decode_host_record(key, value)
        except RecordError as error:
            self._reject("bad-record", str(error))
            return
        if host_of(record.ident) != host_of(self._record.ident):
            self._known[key] = record
