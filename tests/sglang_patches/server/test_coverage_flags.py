"""``--eep-on-lost-coverage`` and the flags that go with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_patches.server import flags
from tests.sglang_patches.server.arguments import given, with_model


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, ("refuse", None)),
        ({"eep_on_lost_coverage": "mask"}, ("mask", None)),
        ({"eep_on_lost_coverage": "mask", "eep_mask_after_ms": 0.0}, ("mask", 0.0)),
        ({"eep_on_lost_coverage": "mask", "eep_mask_after_ms": 250.0}, ("mask", 0.25)),
    ],
)
def test_what_the_flags_ask_for(changes: dict[str, Any], wanted: tuple[str, float | None]) -> None:
    options = flags.parse(given(**changes))
    assert (options.on_lost_coverage, options.mask_after_s) == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eep_mask_after_ms": 5.0}, "needs --eep-on-lost-coverage mask"),
        ({"eep_on_lost_coverage": "mask", "eep_mask_after_ms": -1.0}, "give 0 or more"),
        ({"eep_on_lost_coverage": "mask", "eep_mask_after_ms": float("nan")}, "give 0 or more"),
        ({"eep_on_lost_coverage": "make-room", "eep_mask_after_ms": 5.0}, "needs --eep-on-lost-coverage mask"),
        ({"eep_room_ranks": 1}, "needs --eep-on-lost-coverage make-room"),
        ({"eep_on_lost_coverage": "make-room", "eep_room_ranks": 0}, "from 1 to --tp-size"),
        ({"eep_on_lost_coverage": "make-room", "eep_keep_context": "off"}, "--eep-keep-context off"),
        ({"eep_on_lost_coverage": "make-room", "enable_eplb": True}, "--enable-eplb"),
        (
            {"eep_on_lost_coverage": "mask", "eep_mask_after_ms": 2000.0, "eep_repair_timeout_s": 2.0},
            "less than --eep-repair-timeout-s",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        flags.parse(given(**changes))


@pytest.mark.parametrize(
    ("changes", "slots", "fewest"),
    [
        ({}, 16, 1),
        ({"eep_room_ranks": 2}, 8, 2),
        (
            {"eep_room_ranks": 4},
            6,
            3,
        ),  # as many as there are anyway: four ranks with six hold sixteen without one of them
    ],
)
def test_for_how_many_slots_a_rank_has_addresses(
    tmp_path: Path, changes: dict[str, Any], slots: int, fewest: int
) -> None:
    options = flags.parse(with_model(tmp_path, {"num_experts": 16}, eep_on_lost_coverage="make-room", **changes))
    assert (options.most_slots, options.least_to_serve, options.fewest_ranks) == (slots, fewest, 3)
