"""Where a real server runs: as another user, with few descriptors, with little shared memory, beside another server.

Each is told in docs/operate.md. A server of four ranks is started for each, so that all are long.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from eep.drill.sglang_server import FOUR_RANKS, Server
from tests.sglang.drills import RANK_STARTS, check_end, wait_for

pytestmark = [pytest.mark.timeout(1200), pytest.mark.long]

ARGUMENTS = (*FOUR_RANKS, "--eep-timeout-ms", "20000")
NOBODY = 65534
DESCRIPTORS = 256


class ConfinedServer(Server):
    """A server that ``wrapper`` starts, in a place of its own that any user may write to."""

    def __init__(self, model: Path, place: Path, wrapper: Sequence[str] = ()) -> None:
        place.mkdir(parents=True)
        place.chmod(0o777)
        environment = {"HOME": str(place), "TMPDIR": str(place), "XDG_RUNTIME_DIR": "", "PYTHONDONTWRITEBYTECODE": "1"}
        super().__init__(model, ARGUMENTS, place / "log", environment, place / "d")
        self._command = [*wrapper, *self._command]

    def lives(self) -> list[int]:
        """The processes that rank 1 had, by the log: this user may not ask the supervisor of another."""
        return [int(pid) for pid in re.findall(r"rank 1 starts as incarnation \d+, process (\d+)", self.log)]

    def lose_a_rank(self) -> None:
        """And see that it starts again, and that the answer is the same."""
        before, answer = self.lives(), self.generate("Say 1")
        os.kill(before[-1], signal.SIGKILL)
        wait_for(lambda: len(self.lives()) > len(before), "rank 1 starts again")
        assert self.generate("Say 1") == answer


def in_mount_namespace(*mounts: str) -> list[str]:
    """Runs a command where these are mounted, and nowhere else. Skips where that is not allowed."""
    tried = subprocess.run(["unshare", "-m", "true"], capture_output=True)
    if tried.returncode:
        pytest.skip(f"no mount namespace can be made: {tried.stderr.decode().strip()}")
    return ["unshare", "-m", "sh", "-ec", "\n".join([*mounts, 'exec "$@"']), "sh"]


def shared_memory_of(size: str) -> str:
    return f"mount -t tmpfs -o size={size},mode=1777 tmpfs /dev/shm"


def as_nobody() -> list[str]:
    """Who may read everything, as Python and the model may lie where only root can enter, and write nothing of root's."""
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("only root can start a server as another user, with setpriv")
    reads = "-all,+dac_read_search"
    return [
        *("setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"),
        *("--inh-caps", reads, "--ambient-caps", reads),
    ]


def test_a_server_with_few_descriptors_and_little_shared_memory(sglang: None, model: Path, tmp_path: Path) -> None:
    wrapper = in_mount_namespace(shared_memory_of("4m"), f"ulimit -n {DESCRIPTORS}")
    with ConfinedServer(model, tmp_path / "p", wrapper) as server:
        assert f"{DESCRIPTORS} " in limits_of(server.pid)
        server.lose_a_rank()
    check_end(server)


def limits_of(pid: int) -> str:
    (line,) = [line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "open files" in line]
    return line


def test_a_server_of_a_user_who_is_not_root(sglang: None, model: Path, tmp_path: Path) -> None:
    with ConfinedServer(model, tmp_path / "p", as_nobody()) as server:
        assert {os.stat(f"/proc/{pid}").st_uid for pid in server.processes()} == {NOBODY}
        server.lose_a_rank()
    check_end(server)


def test_a_server_with_too_little_shared_memory_says_what_to_enlarge(sglang: None, model: Path, tmp_path: Path) -> None:
    server = ConfinedServer(model, tmp_path / "p", in_mount_namespace(shared_memory_of("64k")))
    with pytest.raises(AssertionError, match=r"/dev/shm has \d+ KiB left.*--shm-size"):
        server.__enter__()
    assert RANK_STARTS not in server.log


def test_two_servers_of_one_user_do_not_know_of_each_other(sglang: None, model: Path, tmp_path: Path) -> None:
    with ConfinedServer(model, tmp_path / "one") as one:
        with ConfinedServer(model, tmp_path / "other") as other:
            assert one.generate("Say 1") == other.generate("Say 1")
            lives = one.lives()
            other.lose_a_rank()
        check_end(other)
        assert one.lives() == lives, "the end of one server is none of the other's"
        one.lose_a_rank()
    check_end(one)
