"""Loads that drift: three that are made from a seed, and what a real server has recorded.

Made: each expert of each layer has a popularity, lognormal as that of real routing is: the hottest of 256 gets some 15 times
the median. It changes from look to look as three kinds of services see it.

Recorded (record.py): what the gates of a random model picked. No recording of a trained model in service could be had.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from eep.experts.placement.packing import FloatArray

RECORDED = Path(__file__).parent / "recorded_loads.npz"
TRACES = {
    "slow drift": "the topics of the day change: 2 % of the variance is new at each look",
    "fast drift": "10 % of the variance is new at each look",
    "shifts": "a fifth of the layers gets another popularity at once, at every fourth look",
}


def loads(trace: str, layers: int, experts: int, looks: int, seed: int = 0) -> Iterator[FloatArray]:
    """The load at each look, as a mean over the steps since the last."""
    rng = np.random.default_rng(seed)
    popular = rng.normal(0, 1, (layers, experts))
    for look in range(looks):
        match trace:
            case "shifts":
                if look % 4 == 3:
                    rows = rng.choice(layers, max(1, layers // 5), replace=False)
                    popular[rows] = rng.normal(0, 1, (len(rows), experts))
            case _:
                new = 0.02 if trace == "slow drift" else 0.1
                popular = np.sqrt(1 - new) * popular + np.sqrt(new) * rng.normal(0, 1, popular.shape)
        yield np.exp(popular)


def recorded_loads() -> list[FloatArray]:
    """``[layers, experts]`` at each look."""
    with np.load(RECORDED) as file:
        return list(file["loads"].astype(np.float64))
