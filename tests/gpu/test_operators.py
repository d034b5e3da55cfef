"""``eep.dispatch`` and ``eep.combine`` as operators, and DeepEP's low-latency interface, on CUDA tensors."""

from __future__ import annotations

import dataclasses

import pytest

import eep
from tests import moe
from tests.gpu.operator_ranks import DeepEpProgram, OperatorProgram
from tests.ranks import Ranks

ALL = (0, 1, 2)
CONFIG = moe.Config(ranks=3, max_ranks=3, hidden=512, device="cuda")


@pytest.mark.parametrize(("layout", "wire"), [("rank", "bf16"), ("rank", "fp8"), ("expert", "fp8_ue8m0")])
def test_operators(rendezvous: eep.Rendezvous, layout: str, wire: str) -> None:
    config = dataclasses.replace(CONFIG, layout=layout, wire=wire)
    with Ranks(rendezvous, config, program=OperatorProgram) as group:
        group.start(ALL)
        group.connect(ALL)
        for seed in range(3):
            assert all(status.ok for status in group.all(ALL, "operator_step", seed, ALL).values())
        if layout == "rank":
            assert all(status.ok for status in group.all(ALL, "operator_graph", 10, ALL).values())


def test_deep_ep_interface(rendezvous: eep.Rendezvous) -> None:
    with Ranks(rendezvous, CONFIG, program=DeepEpProgram) as group:  # type: ignore[arg-type]
        group.start(ALL)
        for seed, wire in enumerate(["bf16", "fp8", "fp8_ue8m0"]):
            for with_hooks in (False, True):
                masks = group.all(ALL, "low_latency", seed, ALL, wire, with_hooks)
                assert all(mask == [0, 0, 0] for mask in masks.values())
        masks = group.all(ALL, "low_latency_in_flight", 20, ALL)
        assert all(mask == [0, 0, 0] for mask in masks.values())
        masks = group.all(ALL, "low_latency_graph", 10, ALL)
        assert all(mask == [0, 0, 0] for mask in masks.values())
