"""The seal of a record: no change of the record, of its name or of the key goes unnoticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eep.control.store.record_seal import RecordSeal
from eep.control.wire.sealed_frames import KEY_BYTES, new_key

NAME = "/eep/job/host/a/"
SEAL = RecordSeal(b"k" * KEY_BYTES)


@given(name=st.text(st.characters(codec="utf-8")), record=st.binary(max_size=100))
def test_what_was_sealed_opens(name: str, record: bytes) -> None:
    assert SEAL.open(name, SEAL.seal(name, record)) == record


@pytest.mark.parametrize("name", ["/eep/job/host/b/", "/eep/other/host/a/", "/eep/job/host/a", ""])
def test_a_record_of_another_key_or_another_instance_does_not_open(name: str) -> None:
    assert SEAL.open(NAME, SEAL.seal(name, b"{}")) is None


def test_a_part_of_the_name_does_not_pass_for_a_part_of_the_record() -> None:
    assert SEAL.open("/eep/job/ho", SEAL.seal("/eep/job/", b"ho")) is None


def test_a_record_that_was_sealed_with_another_key_does_not_open() -> None:
    assert SEAL.open(NAME, RecordSeal(new_key()).seal(NAME, b"{}")) is None


@pytest.mark.parametrize("stored", [b"", b"{}", b"eep1 ", b"eep1 " + b"0" * 64 + b"\n{}", b"\xff" * 200])
def test_what_has_no_seal_does_not_open(stored: bytes) -> None:
    assert SEAL.open(NAME, stored) is None


@given(record=st.binary(max_size=20), data=st.data())
def test_no_change_goes_unnoticed(record: bytes, data: st.DataObject) -> None:
    sealed = bytearray(SEAL.seal(NAME, record))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= data.draw(st.integers(1, 255))
    assert SEAL.open(NAME, bytes(sealed)) is None
    cut = data.draw(st.integers(0, len(sealed) - 1))
    assert SEAL.open(NAME, SEAL.seal(NAME, record)[:cut]) is None


def test_a_key_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes, got 3"):
        RecordSeal(b"abc")
