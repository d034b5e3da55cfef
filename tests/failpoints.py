"""The matrix of roles and fault points: which process dies, stops or sleeps where, while the others handle a loss.

Each case begins with a loss in the middle of a step, so that the step of every rank is cut short. Then:

- a *survivor*, or *rank 0*, which is one too, dies at a point of the recovery;
- the *joiner*, which is the next incarnation of the lost rank, dies on its way in;
- a *second victim* dies inside a kernel at about the same time;
- the *supervisor* sleeps. (When it dies the whole server ends with it, which other tests cover.)
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

from eep import faults

EVERYTHING = os.environ.get("EEP_ALL_FAILPOINTS") == "1"
"""Run the whole matrix, not the sample that CI runs."""
SEED = 20261115
FIRST_LOSS = "combine.before_rows"
"""Where the first rank dies: the others cannot end their step without it."""
_ENTERING = ("view.", "repair.before", "repair.done", "routing.", "intents.")
"""The points that a joiner passes as well on its way in."""


@dataclass(frozen=True, slots=True)
class Case:
    role: str
    point: str
    action: str = "kill"

    @property
    def armed(self) -> int | None:
        """The rank that is armed at the point; None: the supervisor."""
        return {"survivor": 2, "rank 0": 0, "joiner": 3, "second victim": 2, "supervisor": None}[self.role]

    @property
    def victim(self) -> int:
        """The rank that is lost first, chosen so that the armed one has experts to bring in."""
        return 3 if self.role in ("rank 0", "joiner") else 1

    def __str__(self) -> str:
        return f"{self.role}, {self.action} at {self.point}"


def matrix() -> list[Case]:
    """Every role at every point that it passes."""
    cases = []
    for point in faults.PLACES:
        if faults.is_of_supervisor(point):
            cases.append(Case("supervisor", point, "sleep"))
        elif point.startswith("join."):
            cases.append(Case("joiner", point))
        # No part of a recovery, or not of every one.
        elif not point.startswith(("request.", "kv.", "balance.", "behind.", "room.", "role.", "spare.")):
            cases += [Case("survivor", point), Case("rank 0", point)]
            cases += [Case("joiner", point)] if point.startswith(_ENTERING) else []
    kernels = [point for point in faults.kernel_points() if not point.startswith(("send.", "hosts."))]
    return cases + [Case("second victim", point) for point in kernels if point != FIRST_LOSS]


def stops(cases: Sequence[Case]) -> list[Case]:
    """The same cases with ranks that stop instead of dying. Each costs a deadline."""
    return [Case(case.role, case.point, "stop") for case in cases if case.action == "kill"]


def every_point_once(cases: Sequence[Case], kernels: int) -> list[Case]:
    """One role for each point, and ``kernels`` of the points inside kernels."""
    choose = random.Random(SEED)
    by_point: dict[str, list[Case]] = {}
    for case in cases:
        by_point.setdefault(case.point, []).append(case)
    chosen = [choose.choice(group) for group in by_point.values()]
    inside = [case for case in chosen if case.role == "second victim"]
    return [case for case in chosen if case not in inside] + choose.sample(inside, kernels)


def every_role_once(cases: Sequence[Case]) -> list[Case]:
    """One point for each role, and a second one for the joiner, which passes the most points."""
    choose = random.Random(SEED)
    roles = [*dict.fromkeys(case.role for case in cases), "joiner"]
    chosen: list[Case] = []
    for role in roles:
        chosen.append(choose.choice([case for case in cases if case.role == role and case not in chosen]))
    return chosen
