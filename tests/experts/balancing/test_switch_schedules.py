"""Ranks that switch placements while peers are lost, in thousands of orders: in every step all have the same placement.

Each rank is a coroutine over the real log and the real turns. A seeded schedule decides who goes on, what fails and who dies.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from eep.experts.balancing.placement_log import BaseRecord, LogName, PlacementLog
from eep.experts.balancing.switch_turn import NOTHING, SwitchTurn
from eep.experts.placement.slot_plan import Placement

RANKS, EVERY = 3, 2


def record(doses: int) -> BaseRecord:
    return BaseRecord.of(Placement(np.array([[0, 1]]), 2, 1), np.zeros((1, 2)), doses)


@dataclass
class World:
    """What ranks share, and what they have done."""

    choose: random.Random
    log: PlacementLog
    epoch: int = 1
    active: frozenset[int] = frozenset(range(RANKS))
    said: dict[tuple[int, int], dict[int, int | None]] = field(default_factory=dict)
    """By epoch and number of a gathering: what each rank said in it, None where it was not asked."""
    ran: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    """By epoch and number of a step: the placement that each rank had in it."""
    members: dict[int, frozenset[int]] = field(default_factory=dict)
    proposed: int = 0
    switched: int = 0

    def lose(self, rank: int, comes_back: bool) -> None:
        self.epoch += 1
        self.active = frozenset(range(RANKS)) if comes_back else self.active - {rank}


class Rank:
    def __init__(self, world: World, number: int) -> None:
        self._world, self._number = world, number
        self.staged: tuple[LogName, int, BaseRecord] | None = None
        self._turn = SwitchTurn(EVERY)

    def live(self) -> Iterator[None]:
        while True:
            epoch = self._world.epoch
            if self._number not in self._world.active:
                return
            self._world.members.setdefault(epoch, self._world.active)
            yield
            counts = self._world.log.enter(epoch, record(0))
            self.staged, self._name = None, LogName(epoch, 0)
            self._doses = counts.doses
            yield from self._serve(epoch)

    def _serve(self, epoch: int) -> Iterator[None]:
        """Until the epoch is over for this rank."""
        world, step = self._world, 0
        while True:
            yield
            yield from self._switch(epoch)
            asked = self._turn.begins(epoch)
            self._prepare(epoch)
            word = self._word() if asked else None
            world.said.setdefault((epoch, step), {})[self._number] = word
            while set(world.said[epoch, step]) != world.members[epoch]:
                if world.epoch != epoch:
                    return
                yield
            if world.epoch != epoch and world.choose.random() < 0.5:
                return  # all have said it, and this rank was told of the loss before it heard them
            words = world.said[epoch, step]
            assert len({each is None for each in words.values()}) == 1, "all are asked in the same gathering"
            if asked:
                self._turn.heard({rank: each for rank, each in words.items() if each is not None})
            self._turn.passed()
            yield
            world.ran.setdefault((epoch, step), {})[self._number] = self._doses
            step += 1

    def _switch(self, epoch: int) -> Iterator[None]:
        word = self._turn.agreed(epoch)
        if word == NOTHING:
            return
        yield
        assert self.staged is not None
        name, attempt, proposal = self.staged
        assert word == self._word()
        if self._world.choose.random() < 0.9:  # else the disk is full
            self._world.log.commit(name, attempt)
        yield
        self._doses, self._name, self.staged = proposal.doses, name, None
        self._world.switched += 1

    def _prepare(self, epoch: int) -> None:
        world, following = self._world, LogName(epoch, self._name.number + 1)
        if self._number == min(world.members[epoch]) and world.choose.random() < 0.3:
            world.proposed += 1
            world.log.propose(following, world.choose.randrange(2), record(world.proposed))
        if world.choose.random() < 0.7 and (found := world.log.newest_proposal(following)) is not None:
            self.staged = (following, *found)

    def _word(self) -> int:
        return NOTHING if self.staged is None else self.staged[2].doses


def run(seed: int, path: Path) -> World:
    choose = random.Random(seed)
    world = World(choose, PlacementLog(path))
    lives = {rank: Rank(world, rank).live() for rank in range(RANKS)}
    for _ in range(400):
        if choose.random() < 0.02:
            victim, comes_back = choose.randrange(RANKS), choose.random() < 0.7
            world.lose(victim, comes_back)
            if not world.active:
                break
            lives[victim] = Rank(world, victim).live()
            for rank in world.active - set(lives):
                lives[rank] = Rank(world, rank).live()
        rank = choose.choice(sorted(lives))
        if next(lives[rank], "ended") == "ended":
            del lives[rank]
            if not lives:
                break
    return world


@pytest.mark.parametrize("block", range(10))
def test_all_ranks_have_the_same_placement_in_every_step(block: int, tmp_path: Path) -> None:
    switched = steps = 0
    for seed in range(block * 30, block * 30 + 30):
        world = run(seed, tmp_path / str(seed))
        switched += world.switched
        for (epoch, step), placements in world.ran.items():
            if set(placements) == world.members[epoch]:
                steps += 1
                assert len(set(placements.values())) == 1, f"seed {seed}, epoch {epoch}, step {step}: {placements}"
    assert switched > 20
    assert steps > 200
