"""Weights that outlive the process of their rank: what the next life finds, and what it does not take."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from eep.anchor.anchor import SOCKET, list_held
from eep.anchor.memory_holder import MemoryHolder
from eep.control.launch.processes import INCARNATION, RANK
from eep.control.private_directory import CONTROL_DIRECTORY
from eep.data_plane.memory.shm import SharedMemory
from eep.experts.checksums import Checksums
from eep.experts.layout import ExpertLayout, TensorSpec
from sglang_patches.options import VARIABLE, AnchorOptions, ServerOptions
from sglang_patches.rank import rank_anchor
from sglang_patches.rank.weights import kept_weights
from sglang_patches.rank.weights.kept_weights import Inheritance, find_inheritance, forget, keep, make_way, take_experts

LAYOUT = ExpertLayout(1, 2, (TensorSpec("w", (3,), torch.float32),))
HELD = np.array([[0, 1]], dtype=np.int64)


class Model(torch.nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((40,), value), requires_grad=False)
        self.scale = 2.0 * value


class Keeper:
    """And the lives of ranks, all in this process."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self._patch = directory, monkeypatch
        monkeypatch.setenv(VARIABLE, "")  # so that it is undone
        monkeypatch.setenv(CONTROL_DIRECTORY, str(directory))
        ServerOptions(ranks=3, max_ranks=3).publish()

    def live(self, rank: int, life: int) -> None:
        """From now on this process is that one."""
        self._patch.setenv(RANK, str(rank))
        self._patch.setenv(INCARNATION, str(life))
        end_anchors()

    def load(self, rank: int, life: int, value: float, identity: str = "m") -> Model:
        """What the first life does."""
        self.live(rank, life)
        model, experts = Model(value), take_experts(LAYOUT, "cpu")
        experts.memory.tensors(0)["w"].fill_(value)
        sums = Checksums.none(1, 2)
        for slot in range(2):
            sums.values[0, slot], sums.known[0, slot] = experts.memory.checksum(0, slot), True
        experts.index.note(HELD, sums)
        keep(model, experts, identity)
        return model


def end_anchors() -> None:
    for anchor in (rank_anchor.own_anchor, rank_anchor.common_anchor):
        if anchor.cache_info().currsize:
            anchor().close()
        anchor.cache_clear()


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    holder, (told, ends) = MemoryHolder(str(tmp_path / SOCKET)), os.pipe()
    thread = threading.Thread(target=holder.wait, args=(told,), daemon=True)
    thread.start()
    yield Keeper(tmp_path, monkeypatch)
    end_anchors()
    os.write(ends, b".")
    thread.join()
    os.close(told)
    os.close(ends)


def taken(identity: str = "m") -> Inheritance | None:
    return find_inheritance(identity, "cpu")


def test_the_next_life_has_the_weights_of_the_last(keeper: Keeper) -> None:
    keeper.load(1, 0, 3.0)
    keeper.live(1, 1)
    found, model = taken(), Model()
    assert found is not None
    found.give_to(model)
    assert model.weight.tolist() == [3.0] * 40
    assert model.scale == 6.0
    experts = take_experts(LAYOUT, "cpu")
    held, sums = experts.index.verify(experts.memory, 2)
    assert held.tolist() == HELD.tolist()
    assert sums.known.all()


def test_ranks_with_the_same_weights_share_them(keeper: Keeper) -> None:
    first, second = keeper.load(0, 0, 3.0), keeper.load(1, 0, 3.0)
    other = keeper.load(2, 0, 4.0)
    held = [each for each in list_held(keeper.directory) if each.name.startswith("dense-")]
    assert len(held) == 2
    assert {each.rank for each in held} == {rank_anchor.OF_ALL_RANKS}
    first.weight[0] = 7.0
    assert second.weight[0] == 7.0, "it is the same memory"
    assert other.weight[0] == 4.0


def test_another_rank_finds_nothing(keeper: Keeper) -> None:
    keeper.load(1, 0, 3.0)
    keeper.live(0, 1)
    assert taken() is None


@pytest.mark.parametrize("trouble", ["identity", "forgotten", "torn", "experts", "bytes"])
def test_what_does_not_count_is_not_taken(keeper: Keeper, trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    model = keeper.load(1, 0, 3.0)
    if trouble == "forgotten":
        forget()
    elif trouble == "torn":
        half = msgspec.json.encode({"identity": "m"})[:-3]
        memory = SharedMemory.create("torn", len(half))
        memory.bytes_at(0, len(half)).copy_(torch.frombuffer(bytearray(half), dtype=torch.uint8))
        rank_anchor.own_anchor().hold(kept_weights.WEIGHTS, memory)
    elif trouble == "experts":
        take_experts(LAYOUT, "cpu").index.clear()
    elif trouble == "bytes":
        model.weight[5] = 3.5
    keeper.live(1, 1)
    assert taken("another" if trouble == "identity" else "m") is None
    assert ("not used" in caplog.text or "cannot be read" in caplog.text) == (trouble != "forgotten")
    keeper.load(1, 1, 5.0)  # what is loaded then counts again
    keeper.live(1, 2)
    assert taken() is not None


def test_without_a_keeper_a_rank_loads_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = Keeper(tmp_path, monkeypatch)
    model = nobody.load(1, 0, 3.0)
    assert model.weight.tolist() == [3.0] * 40
    nobody.live(1, 1)
    assert taken() is None
    end_anchors()


def test_what_is_on_another_device_is_not_kept(keeper: Keeper, caplog: pytest.LogCaptureFixture) -> None:
    keeper.live(1, 0)
    model = Model(3.0)
    model.hollow = torch.empty(4, device="meta")
    keep(model, take_experts(LAYOUT, "cpu"), "m")
    assert "hollow is on meta" in caplog.text
    keeper.live(1, 1)
    assert taken() is None


def test_a_record_is_readable(keeper: Keeper) -> None:
    """``eep status`` and people who look for what is held find JSON."""
    keeper.load(1, 0, 3.0)
    found = rank_anchor.own_anchor().find(1, kept_weights.WEIGHTS)
    assert found is not None
    content = SharedMemory.adopt(found[1], found[0].size).bytes_at(0, found[0].size).numpy().tobytes()
    assert json.loads(content)["dense"]["tensors"][0]["name"] == "weight"


def names(keeper: Keeper) -> set[str]:
    return {f"{each.rank} {each.name.partition('-')[0]}" for each in list_held(keeper.directory)}


def test_a_life_that_loads_makes_way_for_that(keeper: Keeper) -> None:
    """What other ranks use stays; what the last of them has used goes."""
    keeper.load(0, 0, 3.0)
    keeper.load(1, 0, 3.0)
    keeper.live(0, 1)
    make_way()
    assert names(keeper) == {"1 weights", "1 experts", "1 slots", "-1 dense"}
    keeper.live(1, 1)
    make_way()
    assert names(keeper) == set()


def test_the_next_server_takes_over_what_the_last_has_left(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lives are numbered from 0 again."""
    anchor = str(keeper.directory)
    ServerOptions(ranks=3, max_ranks=3, anchor=AnchorOptions(directory=anchor, server=7)).publish()
    keeper.load(1, 4, 3.0)
    ServerOptions(ranks=3, max_ranks=3, anchor=AnchorOptions(directory=anchor, server=8)).publish()
    keeper.live(1, 0)
    caplog.set_level("INFO")
    assert taken() is not None
    assert "the weights of an earlier server" in caplog.text
    keeper.live(1, 1)
    assert taken() is not None
    assert "the weights of life 0" in caplog.text


def test_a_server_waits_for_the_ranks_of_another_and_gives_up(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    anchor = AnchorOptions(directory=str(keeper.directory), server=7)
    ServerOptions(ranks=3, max_ranks=3, anchor=anchor).publish()
    monkeypatch.setattr(rank_anchor, "LOCKED_WITHIN", 0.2)
    with (keeper.directory / "rank-1.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        keeper.live(1, 0)
        with pytest.raises(SystemExit, match="rank 1 of another server uses it"):
            rank_anchor.own_anchor()
    rank_anchor.own_anchor()
