"""What the entries of a store are to the core. An entry that is no record is none, and is counted."""

from __future__ import annotations

from collections.abc import Callable

from eep.control.store.embedded_store import Listing
from eep.control.store.key_value import ABSENT, Change, StoredValue
from eep.control.store.record_codec import RecordError, decode_instance, decode_report, host_in
from eep.membership import Event, InstanceSeen, Report, ReportSeen, ReportsListed


class RecordReader:
    def __init__(self, reject: Callable[[str, str], None]) -> None:
        self._reject = reject

    def instance(self, entry: StoredValue[bytes] | None) -> InstanceSeen | None:
        """None if the entry is no record of an instance."""
        if entry is None:
            return InstanceSeen(None, ABSENT)
        try:
            return InstanceSeen(decode_instance(entry.value), entry.version)
        except RecordError as error:
            self._reject("bad-record", str(error))
            return None

    def reports(self, change: Listing | Change[bytes], scope: str) -> Event:
        if isinstance(change, Change):
            return ReportSeen(host_in(change.key), self.report(change.key, change.value), change.version)
        found = {host_in(key): self.report(key, entry.value) for key, entry in change.entries.items()}
        reports = {host: report for host, report in found.items() if report is not None}
        return ReportsListed(reports, scope, change.version)

    def report(self, key: str, value: bytes | None) -> Report | None:
        if value is None:
            return None
        try:
            return decode_report(value, host_in(key))
        except RecordError as error:
            self._reject("bad-record", str(error))
            return None
