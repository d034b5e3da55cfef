"""What every test gets: a rendezvous of its own, and a check afterwards that it left nothing behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import eep

# Tests run several ranks on few cores; thread pools would only compete for them.
torch.set_num_threads(1)
# A shell has what it starts in the background ignore Ctrl-C, and so would all programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if importlib.util.find_spec("hypothesis") is not None:  # what runs on a GPU needs none
    import hypothesis

    # How long an example takes, and how long it takes to make one up, says how busy the machine is.
    hypothesis.settings.register_profile(
        "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
    )
    hypothesis.settings.load_profile("busy")

GONE_WITHIN = 30.0


@pytest.fixture(autouse=True, scope="session")
def private_runtime_directory() -> Iterator[None]:
    """Rendezvous directories go here, apart from those of other programs on the machine."""
    with tempfile.TemporaryDirectory(prefix="eep-tests-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        yield


@pytest.fixture
def rendezvous() -> Iterator[eep.Rendezvous]:
    with eep.Rendezvous.temporary() as place:
        yield place


@pytest.fixture(autouse=True)
def nothing_left_behind(private_runtime_directory: None) -> Iterator[None]:
    """Checks soon after the test, not at once: the keeper of a killed process cleans up, and other tests may run."""
    yield
    end = time.monotonic() + GONE_WITHIN
    while (left := leftovers()) and time.monotonic() < end:
        time.sleep(0.02)
    assert left == []


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small random model."""
    pytest.importorskip("transformers")
    from eep.drill.models.checkpoint import make_model

    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def sglang() -> None:
    """Skips where SGLang is not installed."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed; 'make setup-sglang' does it")


def leftovers() -> list[str]:
    """What lies in this session's directory. EEP's memory has no name anywhere; files of other programs are not ours, and
    a test that starts a server asks that server (:meth:`eep.drill.sglang_server.Server.leftovers`)."""
    return os.listdir(os.environ["XDG_RUNTIME_DIR"])
