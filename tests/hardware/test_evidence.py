"""Evidence as it is sent: what is none, and which ranks it is about."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eep.hardware.evidence import MOST_BYTES, BadEvidence, Evidence, UnknownHardware, parse_evidence, ranks_of

DEVICES = {0: ("GPU-a", "cuda:0"), 1: ("GPU-a", "cuda:0"), 2: ("GPU-b", "cuda:1"), 3: ()}


def parse(**fields: Any) -> Evidence:
    return parse_evidence(json.dumps({"id": "e-1", "reason": "xid.79", **fields}).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rank": 1, "device": "GPU-a"},
        {"rank": -1},
        {"rank": 1.5},
        {"rank": 1, "reason": "two words"},
        {"rank": 1, "reason": "x\n"},
        {"rank": 1, "id": "e\n"},
        {"rank": 1, "id": "e" * 49},
        {"rank": 1, "severity": "dire"},
        {"rank": 1, "detail": "\x1b[2J"},
        {"rank": 1, "detail": "x" * 513},
        {"rank": 1, "detail": "line\n"},
        {"rank": 1, "action": "fence"},
    ],
    ids=repr,
)
def test_what_is_no_evidence_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadEvidence):
        parse(**fields)


def test_too_much_is_refused_and_so_is_what_is_no_json() -> None:
    for body in (b"[" * 5000, b"\xff", b"", b" " * (MOST_BYTES + 1)):
        with pytest.raises(BadEvidence):
            parse_evidence(body)


def test_evidence_is_about_the_ranks_of_a_device_of_a_host_or_one() -> None:
    assert ranks_of(parse(device="GPU-a"), DEVICES, ("here",)) == [0, 1]
    assert ranks_of(parse(device="cuda:1"), DEVICES, ("here",)) == [2]
    assert ranks_of(parse(host="here"), DEVICES, ("here",)) == [0, 1, 2, 3]
    assert ranks_of(parse(rank=3), DEVICES, ("here",)) == [3]


@pytest.mark.parametrize("where", [{"device": "GPU-c"}, {"host": "there"}, {"rank": 4}])
def test_hardware_of_others_is_told_apart(where: dict[str, Any]) -> None:
    with pytest.raises(UnknownHardware):
        ranks_of(parse(**where), DEVICES, ("here",))


def test_the_text_names_reason_device_and_detail() -> None:
    assert parse(device="GPU-a", detail="slot 3").text == "xid.79 of GPU-a: slot 3"
    assert parse(rank=3).text == "xid.79"
