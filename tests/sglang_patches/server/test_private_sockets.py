"""The names of the sockets between the processes of a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_patches import options
from sglang_patches.front_end import tokenizer_hooks
from sglang_patches.options import ServerOptions
from sglang_patches.server import private_sockets
from tests.sglang_patches.server.test_command_line import run_python

_NAMES = """
import dataclasses, json, sys
from types import SimpleNamespace
from sglang_patches import cpu, hooks
cpu.fill_gaps()
from sglang_patches.server import private_sockets
private_sockets.register()
hooks.apply()
from sglang.srt.server_args import PortArgs
arguments = SimpleNamespace(nccl_port=None)
made = [PortArgs.init_new(arguments), PortArgs.init_new(arguments, 2, [0, 1, 2, 3])]
print(json.dumps([dataclasses.asdict(each) for each in made]))
"""


def test_every_address_that_sglang_hands_out_is_a_unix_socket_in_the_directory(sglang: None, tmp_path: Path) -> None:
    done = run_python(_NAMES, EEP_CPU_GAPS="1", SGLANG_USE_CPU_ENGINE="1", **{options.DIRECTORY: str(tmp_path)})
    assert done.returncode == 0, done.stderr[-2000:]
    server, rank = json.loads(done.stdout.splitlines()[-1])
    for made in (server, rank):
        found = {name: value for name, value in made.items() if name.endswith("_ipc_name") and value is not None}
        assert all(value.startswith(f"ipc://{tmp_path}/sockets/") for value in found.values()), found
        assert len(set(found.values())) == len(found) == 6
    differs = {name for name in server if server[name] != rank[name]}
    assert differs == {"scheduler_input_ipc_name", "instance_id"}
    assert rank["scheduler_input_ipc_name"] == private_sockets.rank_address(tmp_path, 2)
    listed = (tmp_path / "sweep").read_text()
    assert listed == f"/dev/shm/sglang_loads_{server['instance_id']}_*.shm\n", "the keeper removes it at the end"


def test_the_place_of_the_sockets_is_closed_to_other_users(tmp_path: Path) -> None:
    place = private_sockets.prepare(tmp_path)
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_directory_whose_sockets_would_have_too_long_names_is_refused_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 107 - len("/sockets/detokenizer")
    fits = Path("/" + "d" * (longest - 1))
    private_sockets.check_paths(fits, max_ranks=64)
    too_long = tmp_path / ("d" * longest)
    monkeypatch.setenv(options.DIRECTORY, str(too_long))
    monkeypatch.setenv(options.VARIABLE, "")
    ServerOptions(ranks=2, max_ranks=2).publish()
    with pytest.raises(SystemExit, match="too long for a Unix socket"):
        tokenizer_hooks._prepare_directory()
    assert not too_long.exists()
