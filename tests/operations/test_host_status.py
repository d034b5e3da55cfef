"""The status of a host, from what its supervisor says and what its ranks have published."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eep.control.private_directory import PrivateDirectory
from eep.experts.margin_record import MarginRecord, publish_margin
from eep.experts.registry.directory_registry import DirectoryRegistry
from eep.experts.view_record import HELD_DIRECTORY
from eep.operations import host_status
from eep.operations.host_status import read_status

RANK = {"in": True, "incarnation": 0, "status": "ready"}
TOLD: dict[str, Any] = {
    "supervisor": "node-0#a1",
    "epoch": 4,
    "links": {"node-1#b2": True},
    "other_hosts": {"node-1": [2, 3], "node-2": [4]},
    "ranks": {"0": RANK, "1": RANK},
}


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the supervisor of ``tmp_path`` says."""
    tmp_path.chmod(0o700)
    told = dict(TOLD)
    monkeypatch.setattr(host_status, "ask_supervisor", lambda *_: SimpleNamespace(body=json.dumps(told)))
    monkeypatch.setattr(host_status.socket, "gethostname", lambda: "machine")
    return told


def registry(directory: Path) -> DirectoryRegistry:
    return DirectoryRegistry(PrivateDirectory(directory).experts / HELD_DIRECTORY)


def test_the_hosts_that_could_go_have_the_names_that_other_hosts_have(tmp_path: Path, told: dict[str, Any]) -> None:
    here = registry(tmp_path)
    publish_margin(here, MarginRecord(4, 1, (0, 1), 1, 1, hosts=(0, 4)))
    status = read_status(tmp_path)
    assert status["margin"]["hosts"] == ["node-0", "node-2"]
    assert {rank["host"] for rank in status["ranks"].values()} == {"node-0"}


def test_a_rank_on_the_only_host_has_the_name_of_the_machine(tmp_path: Path, told: dict[str, Any]) -> None:
    told.update(supervisor="localhost#a1", links=None, other_hosts={})
    here = registry(tmp_path)
    publish_margin(here, MarginRecord(4, 1, (0, 1), 1))
    status = read_status(tmp_path)
    assert status["margin"]["hosts"] == []
    assert status["ranks"]["0"]["host"] == "machine"


def test_a_backup_is_shown_with_what_it_holds(tmp_path: Path, told: dict[str, Any]) -> None:
    status = read_status(tmp_path)
    assert (status["backup"], status["context_copies"]) == (None, None)
    told["backup"] = {"from": "live", "pid": 7, "starts": 1}
    assert read_status(tmp_path)["backup"] == {
        **{"from": "live", "pid": 7, "starts": 1, "held": 0, "wanted": None, "bytes": 0, "filled": False},
    }
