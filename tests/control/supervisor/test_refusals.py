"""Strangers, stale joiners and impostors: a real supervisor refuses them, counts them, and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from eep.control.supervisor.supervisor import Supervisor
from eep.control.wire.client import Client, SupervisorGone
from eep.control.wire.messages import AskStatus, Register, SaySettled, TellRefused
from eep.control.wire.sealed_frames import new_key
from tests.control import ranks
from tests.control.harness import record, runs_with, supervised, until


@asynccontextmanager
async def unchanged() -> AsyncIterator[Supervisor]:
    """A supervisor with one rank, whose record is the same in the end."""
    async with supervised(ranks.steady, 1) as supervisor:
        await until(supervisor, runs_with(supervisor, (0,)))
        before = record(supervisor)
        yield supervisor
        assert record(supervisor) == before, "bad input changed something"


async def refused(path: Path, register: Register) -> str:
    client = await asyncio.to_thread(Client, path)
    client.send(register)
    reply = await asyncio.to_thread(client.receive)
    client.close()
    assert isinstance(reply.message, TellRefused)
    return reply.message.reason


@pytest.mark.parametrize(
    ("register", "reason"),
    [
        (Register(9, 0), "not of this host"),
        (Register(0, 7), "must end"),
        (Register(0, 0), "registered already"),
    ],
    ids=["stranger", "another incarnation", "twice"],
)
def test_a_registration_that_is_not_due_is_refused(register: Register, reason: str) -> None:
    async def body() -> None:
        async with unchanged() as supervisor:
            assert reason in await refused(supervisor.directory.path, register)
            assert supervisor.journal.rejected == {"registration": 1}

    asyncio.run(body())


def test_a_peer_that_has_not_registered_is_not_heard() -> None:
    async def body() -> None:
        async with unchanged() as supervisor:
            client = await asyncio.to_thread(Client, supervisor.directory.path)
            client.send(SaySettled(), 1)
            with pytest.raises(SupervisorGone):
                await asyncio.to_thread(client.receive)
            assert supervisor.journal.rejected == {"unregistered": 1}

    asyncio.run(body())


def test_a_peer_with_another_key_is_not_heard() -> None:
    async def body() -> None:
        async with unchanged() as supervisor:
            key_file = supervisor.directory.path / "key"
            right = key_file.read_bytes()
            key_file.write_bytes(new_key())
            client = await asyncio.to_thread(Client, supervisor.directory.path)
            key_file.write_bytes(right)
            client.send(AskStatus())
            with pytest.raises(SupervisorGone):
                await asyncio.to_thread(client.receive)
            assert supervisor.journal.rejected == {"bad-seal": 1}

    asyncio.run(body())
