"""The loop by which programs on Mooncake's process groups get a rank back, with the calls of eep.pg: the group is asked for
its backend, the state of a peer is true or false, and ranks are added beyond those of the launch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import eep
from eep.pg import PeerState
from eep.process_group import launch_store
from tests.ports import free_ports
from tests.process_group.members import GroupConfig, MemberProgram, Members
from tests.rank_program import PATIENCE_S

Start = Callable[..., Members]


def serve_until_back(member: MemberProgram, rank: int) -> float:
    """Sums while the rank is away, lets it in when all survivors find it ready, and sums with it."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        (state,) = eep.pg.get_peer_state(backend, [rank])
        ready = torch.tensor([int(bool(state))])
        dist.all_reduce(ready, dist.ReduceOp.MIN)  # also the step of the survivors
        if ready.item():
            eep.pg.recover_ranks(backend, [rank])
            return sum_of_ranks()
    raise TimeoutError(f"rank {rank} is {state}")


def come_back(member: MemberProgram) -> float:
    eep.pg.join(dist.group.WORLD._get_backend(torch.device("cpu")))
    return sum_of_ranks()


def sum_of_ranks() -> float:
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.mark.parametrize(("rank", "size"), [(1, 3), (3, 4)])
def test_a_rank_comes_while_the_others_serve(group: Start, rank: int, size: int) -> None:
    """Rank 1 has died; rank 3 is new."""
    members = group(3, max_ranks=4)
    others = [other for other in range(3) if other != rank]
    if rank == 1:
        members[1].kill()
        members.all(others, "deactivate", [1])
    for other in others:
        members[other].send("do", serve_until_back, rank)
    members.relaunch(rank, size=size).send("do", come_back)
    for member in (*others, rank):
        assert members[member].answer() == sum(range(1, size + 1))


def test_which_states_are_true() -> None:
    assert [state for state in PeerState if state] == ["active", "waiting"]
    assert [str(state) for state in PeerState if not state] == ["dead", "left", "starting", "absent"]


def start_through_store(member: MemberProgram, store: str, defer: bool) -> None:
    """No rank is told where the others are."""
    dist.init_process_group(
        "eep",
        store=dist.FileStore(store, -1),
        rank=member.rank,
        world_size=member.config.size,
        pg_options=eep.pg.Options(defer_join=defer),
    )
    member.groups["world"] = dist.group.WORLD


def test_a_rank_that_joins_later_finds_the_others_through_the_store(tmp_path: Path) -> None:
    place, store = tmp_path / "ranks", str(tmp_path / "store")
    place.mkdir(mode=0o700)
    with Members(place, GroupConfig(2), timeout_ms=60_000) as ranks:
        ranks.start(range(2))
        with pytest.raises(ValueError, match="the store does not"):
            ranks[1].call("do", start_through_store, store, True)
        ranks[1].kill()
        ranks.launch(1)
        ranks.all([0, 1], "do", start_through_store, store, False)
        ranks[1].kill()
        ranks[0].call("deactivate", [1])
        ranks.launch(1).call("do", start_through_store, store, True)
        ranks[1].send("join")
        ranks[0].call("recover", [1])
        ranks[1].answer()
        assert set(ranks.all([0, 1], "active").values()) == {(0, 1)}
        ranks.all([0, 1], "destroy")


def begin_and_end(member: MemberProgram, port: int, times: int) -> list[float]:
    """Default groups one after the other, at the same port, as Mooncake's test makes them."""
    launch_store._CLOSES_WITHIN_S = PATIENCE_S  # a busy machine may need more than the second that there is otherwise
    sums = []
    for _ in range(times):
        dist.init_process_group(
            "eep", init_method=f"tcp://127.0.0.1:{port}", rank=member.rank, world_size=member.config.size
        )
        sums.append(sum_of_ranks())
        dist.destroy_process_group()
    return sums


def test_groups_follow_each_other_at_one_port(tmp_path: Path) -> None:
    place = tmp_path / "ranks"
    place.mkdir(mode=0o700)
    (port,) = free_ports(1)
    with Members(place, GroupConfig(4), timeout_ms=60_000) as ranks:
        ranks.start(range(4))
        assert ranks.all(range(4), "do", begin_and_end, port, 5) == dict.fromkeys(range(4), [10.0] * 5)
