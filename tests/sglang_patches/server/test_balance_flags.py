"""``--enable-eplb`` and the flags of SGLang that go with it."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_patches.options import BalanceOptions
from sglang_patches.server import flags, sglang_flags
from tests.sglang_patches.server.arguments import given


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, None),
        ({"eplb_rebalance_num_iterations": 5}, None),
        ({"enable_eplb": True}, BalanceOptions(every=1000)),
        (
            {
                "enable_eplb": True,
                "eplb_rebalance_num_iterations": 50,
                "eplb_rebalance_layers_per_chunk": 3,
                "eplb_min_rebalancing_utilization_threshold": 0.9,
                "eep_staged_experts": 2,
            },
            BalanceOptions(every=50, layers=3, least=0.9, most=2),
        ),
    ],
)
def test_what_the_flags_ask_for(changes: dict[str, Any], wanted: BalanceOptions | None) -> None:
    assert flags.parse(given(**changes)).balance == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"enable_eplb": True, "eplb_rebalance_num_iterations": 0},
            "--eplb-rebalance-num-iterations 0: give 1 or more",
        ),
        ({"enable_eplb": True, "eplb_rebalance_layers_per_chunk": -1}, "layers-per-chunk -1: give 1 or more"),
        ({"enable_eplb": True, "eep_staged_experts": 0}, "--eep-staged-experts 0: give 1 or more"),
        ({"enable_eplb": True, "eplb_min_rebalancing_utilization_threshold": 1.5}, "a number from 0 to 1"),
        ({"eep_staged_experts": 4}, "--eep-staged-experts needs --enable-eplb"),
    ],
)
def test_what_is_out_of_range_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        flags.parse(given(**changes))


def test_sglang_starts_no_balancer_of_its_own() -> None:
    arguments = given(enable_eplb=True)
    options = flags.parse(arguments)
    sglang_flags.imply(arguments, options)
    assert arguments.enable_eplb is False
