"""The member's side: what a rank hears, and that it stops at once when it is out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from eep.control.member import FOREVER, Member
from eep.control.supervisor.supervisor import Supervisor
from eep.membership import Action, OperatorAsked, RankStatus
from tests.control import ranks
from tests.control.harness import kill, patient_policy, record, runs_with, supervised, until


def told(supervisor: Supervisor, rank: int, incarnation: int = 0) -> list[str]:
    return (supervisor.directory.path / f"told-{rank}-{incarnation}").read_text().splitlines()


def test_views_are_applied_once_each_and_after_the_revoke_of_the_one_before() -> None:
    async def body() -> None:
        async with supervised(ranks.records, 3) as supervisor:
            await until(supervisor, runs_with(supervisor, (0, 1, 2)))
            kill(supervisor, 2)
            await until(supervisor, runs_with(supervisor, (0, 1)))
            await until(supervisor, runs_with(supervisor, (0, 1, 2)))
            lines = told(supervisor, 0)
            applied = [line for line in lines if line.startswith("apply")]
            assert applied == [f"apply {epoch}" for epoch in range(1, record(supervisor).view.epoch + 1)]
            for epoch in range(2, record(supervisor).view.epoch + 1):
                assert lines.index(f"revoke {epoch - 1}") < lines.index(f"apply {epoch}")

    asyncio.run(body())


def test_a_rank_that_is_taken_out_revokes_for_good_and_ends_by_itself() -> None:
    async def body() -> None:
        policy = patient_policy(3, leave_grace=120.0)
        async with supervised(ranks.records, 3, policy=policy) as supervisor:
            await until(supervisor, runs_with(supervisor, (0, 1, 2)))
            supervisor.feed(OperatorAsked("out", Action.REMOVE, 1))
            await until(supervisor, runs_with(supervisor, (0, 2)))
            await until(supervisor, lambda: supervisor.state.ranks[1].status is RankStatus.DOWN)
            lines = told(supervisor, 1)
            assert lines[-2] == f"revoke {FOREVER}"
            assert lines[-1] == "ended: rank 1 (incarnation 0) is not in epoch 2"
            assert f"revoke {FOREVER}" not in told(supervisor, 0)

    asyncio.run(body())


def test_a_process_without_a_supervisor_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("EEP_CONTROL_DIR", "EEP_RANK", "EEP_INCARNATION"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="not started by a supervisor"):
        Member.connect()
    tmp_path.chmod(0o700)
    (tmp_path / "key").touch(mode=0o600)
    monkeypatch.setenv("EEP_CONTROL_DIR", str(tmp_path))
    monkeypatch.setenv("EEP_RANK", "0")
    monkeypatch.setenv("EEP_INCARNATION", "0")
    with pytest.raises(PermissionError, match="32 bytes"):
        Member.connect()
    (tmp_path / "key").write_bytes(bytes(32))
    with pytest.raises(ConnectionError, match="no supervisor answers"):
        Member.connect()
