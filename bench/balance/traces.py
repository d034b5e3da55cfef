"""Loads that change: five that are made from a seed, and what a real server has recorded.

Made: each expert of each layer has a popularity, lognormal as that of real routing is: the hottest of 256 gets some 15 times
the median. It changes from look to look as five kinds of services see it.

Recorded (record.py): what the gates of a random model picked. No recording of a trained model in service could be had.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import numpy as np

from eep.experts.placement.packing import FloatArray

RECORDED = Path(__file__).parent / "recorded_loads.npz"
TRACES = {
    "slow drift": "the topics of the day change: 2 % of the variance is new at each look",
    "fast drift": "10 % of the variance is new at each look",
    "shifts": "a fifth of the layers gets another popularity at once, at every fourth look",
    "topics": "a mixture of four popularities; at every fourth look another one has most of it",
    "few prompts": "a popularity that stays, but each look is of eight prompts, which differ more than the experts do",
}
_PICKS = 1e6
"""Of a median expert at each look: so many that their number leaves nothing to chance."""


def loads(trace: str, layers: int, experts: int, looks: int, seed: int = 0) -> Iterator[FloatArray]:
    """``[layers, experts]`` at each look: how often each expert was picked since the look before."""
    rng, shape = np.random.default_rng(seed), (layers, experts)
    match trace:
        case "slow drift":
            endless = _drift(rng, shape, 0.02)
        case "fast drift":
            endless = _drift(rng, shape, 0.1)
        case "shifts":
            endless = _shift(rng, shape)
        case "topics":
            endless = _mix(rng, shape)
        case "few prompts":
            endless = _read_prompts(rng, shape)
        case _:
            raise ValueError(f"there is no trace {trace!r}: choose from {', '.join(TRACES)}")
    for popular in islice(endless, looks):
        yield _PICKS * popular


def _drift(rng: np.random.Generator, shape: tuple[int, int], new: float) -> Iterator[FloatArray]:
    popular = rng.normal(0, 1, shape)
    while True:
        popular = np.sqrt(1 - new) * popular + np.sqrt(new) * rng.normal(0, 1, shape)
        yield np.exp(popular)


def _shift(rng: np.random.Generator, shape: tuple[int, int]) -> Iterator[FloatArray]:
    popular = rng.normal(0, 1, shape)
    for look in count():
        if look % 4 == 3:
            rows = rng.choice(shape[0], max(1, shape[0] // 5), replace=False)
            popular[rows] = rng.normal(0, 1, (len(rows), shape[1]))
        yield np.exp(popular)


def _mix(rng: np.random.Generator, shape: tuple[int, int]) -> Iterator[FloatArray]:
    topics = np.exp(rng.normal(0, 1, (4, *shape)))
    for look in count():
        shares = rng.dirichlet(np.where(np.arange(4) == look // 4 % 4, 4.0, 0.5))
        yield np.tensordot(shares, topics, 1)


def _read_prompts(rng: np.random.Generator, shape: tuple[int, int]) -> Iterator[FloatArray]:
    popular = rng.normal(0, 1, shape)
    while True:
        yield np.exp(popular + rng.normal(0, 1.5, (8, *shape))).mean(axis=0)


def recorded_loads() -> list[FloatArray]:
    """``[layers, experts]`` at each look, as it was counted."""
    with np.load(RECORDED) as file:
        return list(file["loads"].astype(np.float64))
