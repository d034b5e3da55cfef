"""An MPS daemon of our own, for as long as it is needed: with it the kernels of several processes run at the same time on
one GPU. It has its own pipe directory, so that it neither finds nor disturbs one that runs on the machine already."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from eep.access import make_private

PROGRAM = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
STARTS_WITHIN = 30.0
CLIENTS_END_WITHIN = 10
"""Seconds that processes which still use the GPU have when the daemon is told to end."""
ENDS_WITHIN = 30.0


@contextmanager
def daemon() -> Iterator[dict[str, str]]:
    """Yields the environment variables by which a process finds it. RuntimeError if it cannot be started."""
    if shutil.which(PROGRAM) is None:
        raise RuntimeError(
            f"{PROGRAM} was not found: it comes with the NVIDIA driver, and several ranks on one GPU need it"
        )
    with tempfile.TemporaryDirectory(prefix="eep-mps-") as place:
        variables = {PIPES: f"{place}/pipe", LOGS: f"{place}/log"}
        for path in variables.values():
            make_private(Path(path))
        environment = {**os.environ, **variables}
        _start(environment)
        try:
            yield variables
        finally:
            _end(environment)


def _start(environment: dict[str, str]) -> None:
    # Not a pipe, which the daemon would keep open.
    output = Path(environment[LOGS], "start")
    with output.open("wb") as file:
        try:
            subprocess.run(
                [PROGRAM, "-d"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=STARTS_WITHIN,
                check=True,
            )
        except (subprocess.SubprocessError, OSError) as error:
            said = output.read_text(errors="replace").strip()[-500:]
            raise RuntimeError(f"the MPS daemon could not be started: {error}; it said: {said or 'nothing'}") from error


def _end(environment: dict[str, str]) -> None:
    """Ask it to end; kill it if it does not."""
    try:
        subprocess.run(
            [PROGRAM],
            env=environment,
            input=f"quit -t {CLIENTS_END_WITHIN}\n".encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=ENDS_WITHIN,
            check=True,
        )
    except (subprocess.SubprocessError, OSError):
        with suppress(OSError, ValueError):
            os.kill(int(Path(environment[PIPES], f"{PROGRAM}.pid").read_text()), signal.SIGKILL)
