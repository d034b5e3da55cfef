"""A real server that gets lost experts from a backup in host memory and keeps its views in etcd. When the slots that are
left cannot hold all experts, it masks the others."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from eep.control.store.key_value import ABSENT
from eep.control.wire.sealed_frames import new_key
from eep.data_plane.token_buffer import TokenBuffer
from eep.data_plane.tokens import ExpertTokens, RankTokens
from eep.drill.load import Load
from eep.drill.sglang_server import Server
from eep.drill.story import Story
from eep.experts.placement.slot_plan import Placement
from eep.operations.host_status import read_status
from sglang_patches import expert_backup
from sglang_patches.options import ServerOptions, StoreOptions
from sglang_patches.rank import dispatcher
from sglang_patches.rank.rank_data_plane import RankDataPlane
from sglang_patches.server import server_store
from tests.control.store.guarded_etcd import PASSWORD, GuardedEtcd, why_no_guarded_etcd
from tests.sglang.drills import wait_for, wait_for_answers

pytestmark = pytest.mark.timeout(900)

RANKS = 3
PATIENCE = 180.0
# With 8 slots each, two of three ranks hold all 16 experts, and one alone holds half of them.
ARGUMENTS = ("--tp-size", "3", "--dp-size", "3", "--enable-dp-attention", "--ep-size", "3", "--ep-backend", "eep")
SOURCES = ("--eep-redundant-experts", "8", "--eep-backup", "live", "--eep-on-lost-coverage", "mask")
_BACKUP = re.compile(r"the backup starts, process (\d+)")
_FULL = "backup host now keeps"


def keys_in(etcd: GuardedEtcd) -> dict[str, int]:
    """Every key of ours, and the lease with which it ends."""
    found = etcd.ask(
        "kv/range", key=b64encode(b"/eep/").decode(), range_end=b64encode(b"/eep0").decode(), keys_only=True
    )
    return {b64decode(each["key"]).decode(): int(each.get("lease", 0)) for each in found.get("kvs", [])}


@dataclass
class Served:
    server: Server
    directory: Path
    etcd: GuardedEtcd
    prompts: list[list[int]]
    wanted: list[list[int]]

    def story(self) -> Story:
        return Story(self.directory, Load(self.server.url, self.prompts, self.wanted, 3))

    def until(self, condition: Callable[[], object], what: str) -> None:
        try:
            wait_for(condition, what, PATIENCE)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.server.log[-4000:]}") from None

    def backups(self) -> list[int]:
        """The processes of the backup, one after the other."""
        return [int(each) for each in _BACKUP.findall(self.server.log)]

    def until_backed_up(self) -> None:
        """The newest process of the backup has everything."""
        self.until(lambda: _FULL in _BACKUP.split(self.server.log)[-1], "the backup to be filled")

    def ask(self, action: str, rank: int) -> None:
        command = [sys.executable, "-m", "eep.cli", "rank", action, str(rank), "--dir", str(self.directory)]
        subprocess.run(command, check=True, timeout=PATIENCE)

    def answers(self) -> list[list[int]]:
        return [list(tokens) for tokens in Load.with_reference(self.server.url, self.prompts).wanted]


@pytest.fixture(scope="module")
def served(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if (reason := why_no_guarded_etcd()) is not None:
        pytest.skip(reason)
    pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine (pip install 'eep[backup]')")
    place = tmp_path_factory.mktemp("sources")
    choose = random.Random(5)
    prompts = [[choose.randrange(3, 250) for _ in range(choose.randrange(4, 40))] for _ in range(6)]
    etcd = GuardedEtcd(place)
    flags = ("--eep-store", etcd.url, "--eep-store-ca", etcd.ca, "--eep-store-user", "eep")
    secret = ("--eep-store-password-file", etcd.password_file())
    try:
        server = Server(model, (*ARGUMENTS, *SOURCES, *flags, *secret), place / "log", None, place / "d")
        with server:
            found = Served(server, place / "d", etcd, prompts, [])
            found.wanted = found.answers()
            yield found
        assert server.leftovers() == []
        assert all(lease for lease in keys_in(etcd).values()), "what a server wrote goes, however it ended"
    finally:
        etcd.close()


def check(served: Served, story: Story) -> None:
    assert story.wait_until_all_run(RANKS), served.server.log[-3000:]
    story.load.stop()
    story.close()
    assert story.load.answers
    assert [answer.problem for answer in story.load.failed] == []
    assert [(answer.prompt, answer.tokens) for answer in story.load.wrong] == []


@pytest.mark.long
def test_views_are_agreed_on_in_etcd_under_a_name_of_this_server(served: Served) -> None:
    names = {key.split("/")[2] for key in keys_in(served.etcd)}
    assert len(names) == 1
    assert f"under /eep/{names.pop()}/" in served.server.log
    assert PASSWORD not in served.server.log


@pytest.mark.long
def test_what_a_neighbour_writes_to_etcd_costs_nothing(served: Served) -> None:
    story = served.story()
    with story.load:
        wait_for_answers(story.load)
        for key in keys_in(served.etcd):
            served.etcd.ask("kv/put", key=b64encode(key.encode()).decode(), value=b64encode(b"forged").decode())
        assert story.wait_until_noticed(story.kill(1))
        assert story.wait_until_all_run(RANKS), served.server.log[-3000:]
    check(served, story)
    assert "without the key of this job" in served.server.log


@pytest.mark.long
def test_lost_experts_come_from_the_backup(served: Served) -> None:
    served.until_backed_up()
    told = read_status(served.directory)["backup"]
    assert (told["pid"], told["filled"]) == (served.backups()[-1], True)
    assert told["held"] == told["wanted"] > 0
    story = served.story()
    with story.load:
        wait_for_answers(story.load)
        assert story.wait_until_noticed(story.kill(1))
        assert story.wait_until_all_run(RANKS), served.server.log[-3000:]
    check(served, story)
    assert "KiB from dram" in served.server.log
    assert "KiB from disk" not in served.server.log


@pytest.mark.long
def test_a_backup_that_is_lost_together_with_a_rank_is_passed_over_and_replaced(served: Served) -> None:
    served.until_backed_up()
    (before,) = served.backups()
    story = served.story()
    with story.load:
        os.kill(before, signal.SIGKILL)
        assert story.wait_until_noticed(story.kill(2))
        assert story.wait_until_all_run(RANKS), served.server.log[-3000:]
        served.until(lambda: len(served.backups()) > 1, "another backup")
        served.until_backed_up()
    check(served, story)


@pytest.mark.long
def test_what_has_no_slot_is_masked_until_ranks_are_back(served: Served) -> None:
    story = served.story()
    for rank in (1, 2):
        served.ask("remove", rank)
    served.until(lambda: "experts are masked" in served.server.log, "experts to be masked")
    assert story.wait_until_all_run(1)
    degraded = served.answers()
    assert all(degraded), "every request is answered"
    assert degraded != served.wanted, "and not by the whole model"
    for rank in (1, 2):
        served.ask("launch", rank)
    assert story.wait_until_all_run(RANKS), served.server.log[-3000:]
    assert served.answers() == served.wanted
    assert "no expert is masked any more" in served.server.log
    story.close()


# Without a server.


def test_servers_share_etcd_and_each_takes_its_keys_along(tmp_path: Path) -> None:
    if (reason := why_no_guarded_etcd()) is not None:
        pytest.skip(reason)
    etcd = GuardedEtcd(tmp_path)
    wanted = StoreOptions(url=etcd.url, ca=etcd.ca, user="eep", password_file=etcd.password_file())

    async def body() -> None:
        first, second = (server_store.open_store(wanted, new_key()) for _ in range(2))
        assert first is not None
        assert second is not None
        assert (await first.compare_and_swap("k", ABSENT, b"of the first")).done
        assert (await second.compare_and_swap("k", ABSENT, b"of the second")).done
        assert all(keys_in(etcd).values()), "one that is killed leaves them behind for a while only"
        assert len(keys_in(etcd)) == 2
        await first.close()
        entry = await second.get("k")
        assert entry is not None
        assert entry.value == b"of the second"
        await second.close()
        assert keys_in(etcd) == {}

    try:
        server_store.check_reachable(wanted)
        assert keys_in(etcd) == {}, "what was written to try etcd out"
        asyncio.run(body())
    finally:
        etcd.close()


class RecordingBuffer(TokenBuffer):
    """A buffer that only records what is dispatched."""

    combine_dtype = torch.float32

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None = None
    ) -> RankTokens | ExpertTokens:
        self.chosen, self.weights = topk_idx, topk_weights
        return Mock(spec=RankTokens)

    def combine_input(self) -> torch.Tensor:
        raise NotImplementedError

    def combine(
        self, x: torch.Tensor, tokens: RankTokens | ExpertTokens, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        raise NotImplementedError


def masking(masked: list[int]) -> Any:
    """The data plane of a rank with one layer of four experts, of which some have no slot."""
    held = [expert for expert in range(4) if expert not in masked] + [-1] * len(masked)
    facts: Any = SimpleNamespace(
        rank=0,
        device="cpu",
        max_tokens=(8,),
        first_placement=Placement(np.array([held]), 4, 4),
        options=ServerOptions(ranks=1, max_ranks=1, on_lost_coverage="mask"),
    )
    plane: Any = RankDataPlane(facts)
    plane.buffers, plane._counted_share = [RecordingBuffer()], 1.0
    return plane


def test_a_masked_expert_is_sent_nothing_and_weighs_nothing() -> None:
    plane = masking([2])
    ids = torch.tensor([[0, 2], [3, -1]], dtype=torch.int32)
    weights = torch.tensor([[0.7, float("-inf")], [0.5, 0.5]])
    picked = SimpleNamespace(topk_ids=ids, topk_weights=weights, router_logits=None)
    dispatcher.TokenExchange(plane, torch.ones((2, 8)), dispatcher.route_tokens(plane, 0, picked))
    assert plane.buffer.chosen.tolist() == [[0, -1], [2, -1]]
    assert plane.buffer.weights.tolist() == [[pytest.approx(0.7), 0.0], [0.5, 0.0]]
    assert plane.count_uses().tolist() == [[1, 0, 1, 1]]


def test_a_backup_from_the_checkpoint_waits_until_it_is_known_what_to_keep(tmp_path: Path) -> None:
    from tests.experts import model

    assert expert_backup.backup_command(tmp_path, from_checkpoint=True) is None
    expert_backup.describe_checkpoint(tmp_path, tmp_path / "model", [0, 2], model.layout(1))
    command = expert_backup.backup_command(tmp_path, from_checkpoint=True)
    assert command is not None
    assert command[-6:] == ["--checkpoint", str(tmp_path / "model"), "--layers", "0,2", "--dtypes", "float32,float32"]
