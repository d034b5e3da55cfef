"""``--enable-eplb``: experts move while the server runs. SGLang's own balancer, which would stop the ranks, stays off."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from sglang_patches.options import BalanceOptions

_EVERY = 1000
_MOST = 8


def add_balance_flags(add: Callable[..., Any]) -> None:
    add(
        "--eep-shadow-copies",
        choices=("on", "off"),
        default=None,
        help="Give every expert copies on two ranks, where slots allow, before any gets a third: then any one rank may be "
        "lost without an expert being moved. Copies that would only make the busiest rank busier get no tokens until then "
        "(default: off).",
    )
    add(
        "--eep-staged-experts",
        type=int,
        metavar="N",
        default=None,
        help="With --enable-eplb: how many experts may move to a rank at once. It has memory for so many beside its slots "
        f"(default: {_MOST}).",
    )


def parse_balance(arguments: argparse.Namespace) -> BalanceOptions | None:
    """None without ``--enable-eplb``. SystemExit if a flag that goes with it is out of range."""

    def value(name: str, default: Any) -> Any:
        given = getattr(arguments, name, None)
        return default if given is None else given

    if not value("enable_eplb", False):
        if getattr(arguments, "eep_staged_experts", None) is not None:
            raise SystemExit(
                "--eep-staged-experts needs --enable-eplb: without it no expert moves; add it, or leave out both"
            )
        return None
    every, most = value("eplb_rebalance_num_iterations", _EVERY), value("eep_staged_experts", _MOST)
    layers, least = (
        value("eplb_rebalance_layers_per_chunk", None),
        value("eplb_min_rebalancing_utilization_threshold", 1.0),
    )
    for flag, number in (
        ("--eplb-rebalance-num-iterations", every),
        ("--eep-staged-experts", most),
        ("--eplb-rebalance-layers-per-chunk", layers),
    ):
        if number is not None and number < 1:
            raise SystemExit(f"{flag} {number}: give 1 or more")
    if not 0 <= least <= 1:
        raise SystemExit(f"--eplb-min-rebalancing-utilization-threshold {least}: give a number from 0 to 1")
    return BalanceOptions(every=every, least=least, layers=layers, most=most)


def hide_from_sglang(arguments: argparse.Namespace) -> None:
    """SGLang must not start a balancer of its own."""
    if getattr(arguments, "enable_eplb", False):
        arguments.enable_eplb = False
