"""The records of :mod:`eep.membership` as bytes in a store: JSON, so that an operator can read them there."""

from __future__ import annotations

import msgspec

from eep.membership import InstanceRecord, Report, host_of

INSTANCE_KEY = "instance"
REPORT_PREFIX = "host/"
"""What all reports are stored under, each with a slash at its end, so that the key of one is no prefix of another."""

LINK_PREFIX = "link/"
"""What the addresses of host links are stored under, in the same way."""

_instances = msgspec.json.Decoder(InstanceRecord)
_reports = msgspec.json.Decoder(Report)


class RecordError(Exception):
    """What the store holds is not a record."""


def report_key(host: str) -> str:
    return f"{REPORT_PREFIX}{host}/"


def host_in(key: str) -> str:
    """The host whose report has this key."""
    return key.removeprefix(REPORT_PREFIX).removesuffix("/")


def link_key(host: str) -> str:
    return f"{LINK_PREFIX}{host}/"


def encode_record(record: InstanceRecord | Report) -> bytes:
    return msgspec.json.encode(record)


def decode_instance(value: bytes) -> InstanceRecord:
    try:
        instance = _instances.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RecordError(f"what is stored as {INSTANCE_KEY!r} is no record: {error}") from error
    if not len(instance.owners) == len(instance.granted) == instance.view.max_ranks:
        raise RecordError(f"the record under {INSTANCE_KEY!r} does not agree with itself on max_ranks")
    return instance


def decode_report(value: bytes, host: str) -> Report:
    try:
        report = _reports.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RecordError(f"what is stored as {report_key(host)!r} is no report: {error}") from error
    if host_of(report.ident) != host:
        raise RecordError(f"the report of {host} was written by {report.ident}")
    return report
