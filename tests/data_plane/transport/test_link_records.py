"""What the two ends of a link tell each other through the store, and the secret that they make."""

from __future__ import annotations

import ctypes

import pytest

from eep.abi.hosts import LinkOffer, LinkSecret
from eep.abi.structures import Shape
from eep.data_plane.transport.link_records import (
    BadLinkRecord,
    LinkEnd,
    LinkRecord,
    link_name,
    open_link,
    seal_link,
    secret_of,
)
from eep.data_plane.transport.remote_hosts import RemoteHosts
from eep.experts.registry.directory_registry import DirectoryRegistry

KEY, NONCE = b"k" * 32, b"n" * 16
NAME = link_name(LinkEnd(3, 1), LinkEnd(0, 0))
RECORD = LinkRecord(NONCE, bytes(Shape(4, 8, 256)), bytes(LinkOffer(1, 2)))


def test_a_record_is_read_as_it_was_written() -> None:
    assert open_link(KEY, NAME, seal_link(KEY, NAME, RECORD)) == RECORD


def test_the_name_says_whose_it_is_and_for_whom() -> None:
    ends = [LinkEnd(1, 11), LinkEnd(11, 1), LinkEnd(1, 1)]
    names = {link_name(owner, peer) for owner in ends for peer in ends}
    assert len(names) == len(ends) ** 2


@pytest.mark.parametrize("byte", [0, 12, 40, 100, -33, -1])
def test_a_record_that_was_changed_does_not_verify(byte: int) -> None:
    value = bytearray(seal_link(KEY, NAME, RECORD))
    value[byte] ^= 1
    with pytest.raises(BadLinkRecord, match="key of this job"):
        open_link(KEY, NAME, bytes(value))


@pytest.mark.parametrize(
    "value", [b"", b"x" * 31, seal_link(KEY, NAME, RECORD)[:-1], seal_link(KEY, NAME, RECORD) + b"x"]
)
def test_a_record_of_another_size_does_not_verify(value: bytes) -> None:
    with pytest.raises(BadLinkRecord):
        open_link(KEY, NAME, value)


def test_a_record_of_another_key_or_another_pair_does_not_verify() -> None:
    value = seal_link(KEY, NAME, RECORD)
    for key, name in [
        (b"x" * 32, NAME),
        (KEY, link_name(LinkEnd(3, 2), LinkEnd(0, 0))),
        (KEY, link_name(LinkEnd(0, 0), LinkEnd(3, 1))),
    ]:
        with pytest.raises(BadLinkRecord):
            open_link(key, name, value)


def test_a_secret_depends_on_the_key_the_link_and_the_nonce() -> None:
    made = [
        bytes(secret_of(*given))
        for given in [(KEY, NAME, NONCE), (b"x" * 32, NAME, NONCE), (KEY, NAME + "x", NONCE), (KEY, NAME, b"m" * 16)]
    ]
    assert len(set(made)) == len(made)
    assert bytes(secret_of(KEY, NAME, NONCE)) == made[0]
    assert len(made[0]) == ctypes.sizeof(LinkSecret)
    parts = {made[0][i : i + 16] for i in range(0, len(made[0]), 16)}
    assert len(parts) == len(made[0]) // 16, "no part of it is that of another"


def test_bad_settings_say_what_is_wrong(tmp_path_factory: pytest.TempPathFactory) -> None:
    registry = DirectoryRegistry(tmp_path_factory.mktemp("links"))
    with pytest.raises(ValueError, match="32 bytes"):
        RemoteHosts(frozenset({1}), "10.0.0.1", registry, b"short")
    with pytest.raises(ValueError, match="address of this host"):
        RemoteHosts(frozenset({1}), "0.0.0.0", registry, KEY)
