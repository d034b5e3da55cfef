"""The backup service in processes of its own, over the real transfer engine."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from eep.data_plane.memory.shm import SharedMemory
from eep.experts.backup.backup_client import BackupClient
from eep.experts.backup.service import BackupOptions, BackupService
from eep.experts.backup.transfer_engine import Engine
from eep.experts.backup.transport import TransferFailed
from eep.experts.placement.slot_plan import Placement
from eep.experts.registry.directory_registry import DirectoryRegistry, wait_for_change
from eep.experts.registry.published_records import BACKUPS, BackupRecord, encode_record
from eep.experts.repair.reader import SourceLost, Want
from tests.control.harness import wait_until_all_threads_stand_still
from tests.experts import model
from tests.experts.ranks import Rank

pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine (pip install 'eep[backup]')")

PATIENCE = 120.0  # for processes to do their work on a busy machine; never the thing that is tested
NUMBER = model.LAYERS * model.EXPERTS


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


@pytest.fixture
def registry(tmp_path: pathlib.Path) -> Iterator[DirectoryRegistry]:
    registry = DirectoryRegistry(tmp_path / "registry")
    yield registry
    registry.close()


@pytest.fixture
def serve(tmp_path: pathlib.Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def serve(name: str, *arguments: str, memory: str = "1GiB") -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "eep.experts.backup.command",
            "backup",
            "serve",
            "--name",
            name,
            "--memory",
            memory,
        ]
        command += ["--registry", str(tmp_path / "registry"), *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield serve
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def ranks(tmp_path: pathlib.Path) -> Iterator[dict[int, Rank]]:
    """Ranks 0 and 1 with four slots each: together they hold every expert once, and each shows its own."""
    (tmp_path / "registry").mkdir(mode=0o700)
    ranks = {number: Rank(tmp_path, number, 4) for number in range(2)}
    for number, rank in ranks.items():
        assert rank.hear() == {"ready": True}
        rank.ask("load", placement=PLACEMENT.physical_to_logical.tolist())
        rank.ask("publish", placement=PLACEMENT.physical_to_logical.tolist(), host=number)
    yield ranks
    for rank in ranks.values():
        rank.end()


PLACEMENT = Placement(np.tile(np.arange(8), (model.LAYERS, 1)), model.EXPERTS, 4)


def client(registry: DirectoryRegistry, engine: Engine) -> BackupClient:
    return BackupClient(registry, engine, model.layout(4), model.EXPERTS)


def wait_until(registry: DirectoryRegistry, backups: BackupClient, **held: int) -> None:
    """Until exactly the named services are there with at least that many experts each."""
    known: dict[str, bytes] = {}
    for _ in range(1000):
        found = {name: int(backup.held.sum()) for name, backup in backups.backups().items()}
        if set(found) == set(held) and all(found[name] >= held[name] for name in held):
            return
        seen = wait_for_change(registry, BACKUPS, known, PATIENCE)
        assert seen != known, f"waited for {held}, found {found}"
        known = seen
    raise AssertionError("the registry never came to rest")


def read_all(backups: BackupClient, name: str) -> int:
    """Read everything that a service holds and compare every byte; how many experts that were."""
    held = np.argwhere(backups.backups()[name].held).tolist()
    for layer, expert in held:
        into = [torch.zeros(spec.nbytes, dtype=torch.uint8) for spec in model.layout(1).tensors]
        backups.reader(name).read([Want(layer, expert, -1, into)])
        assert all(torch.equal(*pair) for pair in zip(into, model.pieces(layer, expert), strict=True))
    return len(held)


def test_filled_from_live_parameters_and_read_back(
    ranks: dict[int, Rank],
    serve: Callable[..., subprocess.Popen[str]],
    registry: DirectoryRegistry,
    engine: Engine,
) -> None:
    serve("a")
    backups = client(registry, engine)
    wait_until(registry, backups, a=NUMBER)
    assert read_all(backups, "a") == NUMBER
    sums = backups.checksums()
    assert sums.known.all(), "one that joins later learns every checksum from the services"
    assert (sums.values == model.checksums().values).all()

    ranks[1].kill()
    before = PLACEMENT.physical_to_logical.tolist()
    after = np.tile([4, 5, 6, 7, -1, -1, -1, -1], (model.LAYERS, 1)).tolist()
    said = ranks[0].ask("repair", before=before, after=after, active=[0], incarnations=[0, 0], backup=True)
    assert said == {"moved": {"DRAM": 4 * model.LAYERS}, "setbacks": []}
    assert ranks[0].ask("look", placement=after)["wrong"] == []


def test_a_service_killed_in_the_middle_is_replaced_by_its_replica(
    ranks: dict[int, Rank],
    serve: Callable[..., subprocess.Popen[str]],
    registry: DirectoryRegistry,
    engine: Engine,
) -> None:
    services = {name: serve(name, "--host", host, "--replicas", "2", "--expect", "2") for name, host in ("a0", "b1")}
    backups = client(registry, engine)
    wait_until(registry, backups, a=NUMBER, b=NUMBER)
    ranks[1].kill()
    before = PLACEMENT.physical_to_logical.tolist()
    after = np.tile([4, 5, 6, 7, -1, -1, -1, -1], (model.LAYERS, 1)).tolist()
    ranks[0].tell("repair", before=before, after=after, active=[0], incarnations=[0, 0], backup=True, pause=True)
    while "pause" in (said := ranks[0].hear()):
        if said["pause"] == "read backup a":
            # It was alive a moment ago; now it dies under the reader's hands.
            services["a"].kill()
            services["a"].wait()
        ranks[0].tell("go")
    assert said["moved"] == {"FAR_DRAM": 4 * model.LAYERS}
    assert said["setbacks"]
    assert all("backup a" in setback for setback in said["setbacks"])
    assert ranks[0].ask("look", placement=after)["wrong"] == []


def test_the_share_of_a_dead_service_is_filled_elsewhere_and_it_may_come_back(
    ranks: dict[int, Rank],
    serve: Callable[..., subprocess.Popen[str]],
    registry: DirectoryRegistry,
    engine: Engine,
) -> None:
    first = serve("a", "--host", "0", "--expect", "2")
    serve("b", "--host", "1", "--expect", "1")
    backups = client(registry, engine)
    wait_until(registry, backups, a=4 * model.LAYERS, b=4 * model.LAYERS)
    held = {name: backup.held for name, backup in backups.backups().items()}
    assert (held["a"] | held["b"]).all(), "every expert, remainders included"
    # Rank 0 on host 0 has the only live copies of experts 0 to 3, so host 0 must not have their only backups.
    assert not (held["a"][:, :4] & ~held["b"][:, :4]).any()

    first.send_signal(signal.SIGKILL)
    first.wait()
    wait_until(registry, backups, b=NUMBER)
    assert read_all(backups, "b") == NUMBER

    serve("a", "--host", "0", "--expect", "2", "--replicas", "2")
    wait_until(registry, backups, a=NUMBER, b=NUMBER)
    assert read_all(backups, "a") == NUMBER


def test_filled_from_a_checkpoint_before_any_rank_is_there(
    serve: Callable[..., subprocess.Popen[str]],
    registry: DirectoryRegistry,
    engine: Engine,
    tmp_path: pathlib.Path,
) -> None:
    serve("disk", "--checkpoint", str(model.save_checkpoint(tmp_path / "checkpoint")))
    backups = client(registry, engine)
    wait_until(registry, backups, disk=NUMBER)
    assert read_all(backups, "disk") == NUMBER


def test_damaged_live_parameters_are_not_kept(
    ranks: dict[int, Rank],
    serve: Callable[..., subprocess.Popen[str]],
    registry: DirectoryRegistry,
    engine: Engine,
) -> None:
    ranks[0].ask("flip", layer=2, slot=1, bit=77)
    serve("a")
    backups = client(registry, engine)
    wait_until(registry, backups, a=NUMBER - 1)
    assert not backups.backups()["a"].held[2, 1]
    assert read_all(backups, "a") == NUMBER - 1


def test_a_service_whose_share_does_not_fit_refuses_to_start(
    ranks: dict[int, Rank], serve: Callable[..., subprocess.Popen[str]]
) -> None:
    said, _ = (process := serve("small", memory="4KiB")).communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "is to keep" in said, "the need is stated first"
    assert "allow more with --memory" in said


def test_a_service_ends_cleanly_when_told(
    ranks: dict[int, Rank],
    serve: Callable[..., subprocess.Popen[str]],
    registry: DirectoryRegistry,
    engine: Engine,
) -> None:
    process = serve("a")
    backups = client(registry, engine)
    wait_until(registry, backups, a=NUMBER)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert registry.scan(BACKUPS) == {}


def test_filling_shows_its_progress_on_a_terminal(ranks: dict[int, Rank], tmp_path: pathlib.Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "eep.experts.backup.command", "backup", "serve", "--name", "a", "--memory", "1GiB"]
    command += ["--registry", str(tmp_path / "registry")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while b"copying experts" not in shown:
            shown += os.read(ours, 4096)
        process.kill()
    os.close(ours)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--address", "0.0.0.0"], "name the address of one interface"),
        (["--memory", "lots"], "is not a size"),
        (["--replicas", "0"], "at least 1"),
        (["--checkpoint", "/nonesuch"], "no *.safetensors files"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(
    serve: Callable[..., subprocess.Popen[str]], arguments: list[str], complaint: str
) -> None:
    process = serve("a", *arguments)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert complaint in said
    assert "Traceback" not in said


def test_what_is_exposed_can_be_read_but_not_written(engine: Engine) -> None:
    memory = SharedMemory.create("exposed", 1 << 16)
    memory.bytes_at(0, memory.size)[:] = 7
    address = engine.expose(memory)
    other = Engine()
    target = torch.zeros(1 << 16, dtype=torch.uint8)
    other.read(engine.session, [(address, target)])
    assert (target == 7).all()
    scribble = torch.full((4096,), 9, dtype=torch.uint8)
    assert other._engine.transfer_sync_write(engine.session, scribble.data_ptr(), address, 4096) != 0
    assert (memory.bytes_at(0, memory.size) == 7).all()
    with pytest.raises(TransferFailed):
        other.read(engine.session, [(address + (1 << 16) - 10, target[:4096])])
    with pytest.raises(TransferFailed):
        other.read(engine.session, [(id(engine), target[:16])])
    memory.bytes_at(0, memory.size)[:] = 8
    other.read(engine.session, [(address, target)])
    assert (target == 8).all(), "later changes show"
    engine.withdraw(address)
    with pytest.raises(TransferFailed):
        other.read(engine.session, [(address, target)])
    memory.close()


def test_reads_that_fail_do_not_eat_up_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eep.experts.backup.transfer_engine._MOST_ABANDONED_BYTES", 10 << 16)
    other = Engine()
    target = torch.zeros(1 << 16, dtype=torch.uint8)
    for _ in range(40):
        with pytest.raises(TransferFailed):
            other.read(engine.session, [(4096, target)])
    assert sum(scratch.numel() for scratch in other._abandoned) <= 12 << 16


def test_a_stopped_service_is_given_up_and_its_late_answer_lands_nowhere(
    ranks: dict[int, Rank],
    serve: Callable[..., subprocess.Popen[str]],
    registry: DirectoryRegistry,
    engine: Engine,
) -> None:
    process = serve("a")
    backups = client(registry, engine)
    wait_until(registry, backups, a=NUMBER)
    reader = backups.reader("a")
    into = [torch.zeros(spec.nbytes, dtype=torch.uint8) for spec in model.layout(1).tensors]
    reader.read([Want(0, 0, -1, into)])
    os.kill(process.pid, signal.SIGSTOP)
    wait_until_all_threads_stand_still(process.pid)
    try:
        for piece in into:
            piece.zero_()
        with pytest.raises(SourceLost):
            reader.read([Want(0, 0, -1, into)])
    finally:
        os.kill(process.pid, signal.SIGCONT)
    # The service is back and answers others again: by then its late answer has gone wherever it goes.
    late, end = [torch.zeros_like(piece) for piece in into], time.monotonic() + PATIENCE
    while not any(piece.any() for piece in late):
        assert time.monotonic() < end, "the service was resumed and does not answer"
        with contextlib.suppress(SourceLost):
            reader.read([Want(0, 0, -1, late)])
    assert all(not piece.any() for piece in into)


def test_a_record_that_points_elsewhere_yields_wrong_bytes_that_are_caught(
    ranks: dict[int, Rank],
    serve: Callable[..., subprocess.Popen[str]],
    registry: DirectoryRegistry,
    engine: Engine,
    tmp_path: pathlib.Path,
) -> None:
    process = serve("a")
    backups = client(registry, engine)
    wait_until(registry, backups, a=NUMBER)
    record = backups.records()["a"]
    shifted = [type(e)(e.address + 1, e.numbers[:-8], e.checksums[:-8]) for e in record.extents]
    registry.publish(
        f"{BACKUPS}forged", encode_record(BackupRecord(record.host, record.session, record.shape, tuple(shifted)))
    )
    ranks[1].kill()
    before = PLACEMENT.physical_to_logical.tolist()
    after = np.tile([4, 5, -1, -1, -1, -1, -1, -1], (model.LAYERS, 1)).tolist()
    said = ranks[0].ask("repair", before=before, after=after, active=[0], incarnations=[0, 0], backup=True)
    assert said["moved"] == {"DRAM": 2 * model.LAYERS}
    assert said["setbacks"]
    assert all("forged: wrong checksum" in setback for setback in said["setbacks"])
    assert ranks[0].ask("look", placement=after)["wrong"] == []
    assert process.poll() is None


def test_a_share_of_several_extents_is_complete(
    ranks: dict[int, Rank], registry: DirectoryRegistry, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eep.experts.backup.service._EXTENT_BYTES", 5 * model.layout(1).expert_bytes)
    said: list[str] = []
    options = BackupOptions("here", 0, 1 << 30)
    service = BackupService(registry, Engine(), options, said.append)
    service.start()
    assert service.refresh() == NUMBER
    assert service.refresh() == 0
    backups = client(registry, engine)
    assert len(backups.records()["here"].extents) == -(-NUMBER // 5)
    assert read_all(backups, "here") == NUMBER
    assert service.used_bytes == NUMBER * model.layout(1).expert_bytes
    service.stop()
    assert registry.scan(BACKUPS) == {}
