"""Which launcher a server uses, and which device a spare opens."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from eep.control.launch.fork_launcher import ForkLauncher
from eep.control.launch.fork_server import ForkServerProcess
from eep.control.launch.processes import SubprocessLauncher
from eep.control.launch.spare_launcher import SpareLauncher
from sglang_patches import cpu, recipe
from sglang_patches.cuda import spare_preparation
from sglang_patches.options import VARIABLE, ServerOptions
from sglang_patches.rank import rank_process, whole_spare


@pytest.mark.parametrize(
    ("spares", "forks", "kind"),
    [
        (0, True, ForkLauncher),
        (0, False, SubprocessLauncher),
        (2, True, SpareLauncher),
        (2, False, SpareLauncher),
    ],
)
@pytest.mark.parametrize("gaps", ["0", "1"])
@pytest.mark.parametrize("keeps", [True, False])
def test_the_launcher_of_a_server(
    spares: int, forks: bool, kind: type, gaps: str, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks and spares are forked wherever the controller could fork. A spare is a whole rank where its rank keeps all that
    it could start from."""
    from sglang_patches.server import controller_process, server_ranks

    with socket.socket() as unused:
        server = ForkServerProcess(0, unused, {}) if forks else None
        monkeypatch.setattr(controller_process, "fork_server", server)

    monkeypatch.setenv(VARIABLE, "")  # so that it is put back
    monkeypatch.setenv(cpu.ASKED_FOR, gaps)
    ServerOptions(ranks=4, max_ranks=4, spares=spares, keeps_weights=keeps).publish()
    launcher = server_ranks._launcher()
    assert isinstance(launcher, kind)
    if isinstance(launcher, SpareLauncher):
        assert launcher.status()["wanted"] == spares
        assert (launcher.forks is not None) == forks
        opens = "" if gaps == "1" else spare_preparation.ENTRY
        assert (launcher._warm, launcher._binds) == ((whole_spare.ENTRY, True) if keeps else (opens, False))


def test_the_signal_of_a_rank_that_failed_does_not_end_the_controller(caplog: pytest.LogCaptureFixture) -> None:
    from sglang_patches.server import controller

    before = signal.getsignal(signal.SIGQUIT)
    try:
        controller.outlive_failed_ranks()
        os.kill(os.getpid(), signal.SIGQUIT)
    finally:
        signal.signal(signal.SIGQUIT, before)
    assert "a rank has failed" in caplog.text


def test_a_spare_opens_the_device_that_sglang_gave_to_the_rank(tmp_path: Path) -> None:
    for rank, gpu in ((0, 0), (1, 3)):
        recipe.write(rank_process.recipe_path(tmp_path, rank), {"arguments": ["args", "ports", gpu, rank], "named": {}})
    assert [spare_preparation.gpu_of_rank(tmp_path, rank) for rank in (0, 1)] == [0, 3]
    recipe.write(rank_process.recipe_path(tmp_path, 2), {"arguments": ["args", "ports", "moved"], "named": {}})
    with pytest.raises(RuntimeError, match="'moved'"):
        spare_preparation.gpu_of_rank(tmp_path, 2)
