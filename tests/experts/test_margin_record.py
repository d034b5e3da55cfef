"""The margin in ``eep status``: what the first rank says, for as long as it is true."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eep import cli
from eep.control.supervisor.supervisor import Supervisor
from eep.experts.margin_record import MarginRecord, publish_margin, read_margin
from eep.experts.placement.margin import find_margin
from eep.experts.placement.slot_plan import plan_placement
from eep.experts.registry.directory_registry import DirectoryRegistry
from eep.experts.view_record import HELD_DIRECTORY
from tests.control.harness import runs_with, supervised, until
from tests.experts import model
from tests.recovery import covered_rank

ALL = (0, 1, 2, 3)


def expected(active: tuple[int, ...]) -> dict[str, Any]:
    """The margin of the placement that the ranks of a view make from the first one."""
    load, topology = np.ones((model.LAYERS, model.EXPERTS)), [0] * len(ALL)
    first = plan_placement(load, None, ALL, covered_rank.SLOTS, topology)
    found = find_margin(plan_placement(load, first, active, covered_rank.SLOTS, topology), active, topology)
    return {
        **{"any_ranks": found.any_ranks, "ranks": list(found.ranks), "repairable_ranks": found.repairable_ranks},
        **{"any_hosts": None, "hosts": []},
    }


def test_eep_status_shows_what_the_instance_could_lose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(covered_rank.CHECKPOINT, str(model.save_checkpoint(tmp_path / "model")))

    async def eep(supervisor: Supervisor, *arguments: str) -> str:
        code = await asyncio.to_thread(cli.main, [*arguments, "--dir", str(supervisor.directory.path)])
        assert code == 0
        return capsys.readouterr().out

    async def body() -> None:
        async with supervised(covered_rank.main, forked=True) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            whole = json.loads(await eep(supervisor, "status", "--json"))["margin"]
            assert whole == expected(ALL)
            await eep(supervisor, "rank", "remove", "3")
            await until(supervisor, runs_with(supervisor, (0, 1, 2)))
            smaller = json.loads(await eep(supervisor, "status", "--json"))["margin"]
            assert smaller == expected((0, 1, 2))
            assert (whole["repairable_ranks"], smaller["repairable_ranks"]) == (1, 0)

    asyncio.run(body())


@pytest.fixture
def registry(tmp_path: Path) -> DirectoryRegistry:
    return DirectoryRegistry(tmp_path / HELD_DIRECTORY)


def test_a_margin_of_another_epoch_is_not_shown(tmp_path: Path, registry: DirectoryRegistry) -> None:
    publish_margin(registry, MarginRecord(4, 1, (0, 1), 1))
    assert read_margin(tmp_path, 4) == {
        **{"any_ranks": 1, "ranks": (0, 1), "repairable_ranks": 1, "any_hosts": None, "hosts": ()},
    }
    assert read_margin(tmp_path, 5) is None


def test_the_next_writer_replaces_the_margin(tmp_path: Path, registry: DirectoryRegistry) -> None:
    publish_margin(registry, MarginRecord(4, 1, (0, 1), 1))
    publish_margin(DirectoryRegistry(tmp_path / HELD_DIRECTORY), MarginRecord(5, 0, (), 1))
    shown = read_margin(tmp_path, 5)
    assert shown is not None
    assert shown["any_ranks"] == 0


def test_a_margin_goes_with_its_writer(tmp_path: Path, registry: DirectoryRegistry) -> None:
    publish_margin(registry, MarginRecord(4, 1, (0, 1), 1))
    registry.close()
    assert read_margin(tmp_path, 4) is None


def test_a_record_that_is_no_margin_is_not_shown(tmp_path: Path, registry: DirectoryRegistry) -> None:
    registry.publish("margin", b'{"epoch": 4}')
    assert read_margin(tmp_path, 4) is None


def test_asking_makes_no_directory(tmp_path: Path) -> None:
    assert read_margin(tmp_path / "experts", 1) is None
    assert not list(tmp_path.iterdir())
