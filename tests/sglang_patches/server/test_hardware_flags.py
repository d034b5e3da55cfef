"""Which devices are watched, and what signs mean: what the flags say, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from eep.control.launch.kept_process import KeptProcess
from sglang_patches.options import HardwareOptions
from sglang_patches.server import device_watcher, hardware_flags
from tests.sglang_patches.server.arguments import given


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("pynvml")
    module.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, "pynvml", module)


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize(
    ("asked", "device", "watched"),
    [(None, "cuda", True), (None, "cpu", False), ("off", "cuda", False), ("on", "cpu", True)],
)
def test_devices_are_watched_where_there_are_any(asked: str | None, device: str, watched: bool) -> None:
    assert hardware_flags.parse_hardware(given(eep_watch_devices=asked), device) == HardwareOptions(watched=watched)


def test_without_the_package_nothing_is_watched_and_asking_for_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert hardware_flags.parse_hardware(given(), "cuda") == HardwareOptions()
    with pytest.raises(SystemExit, match="needs the package nvidia-ml-py"):
        hardware_flags.parse_hardware(given(eep_watch_devices="on"), "cuda")


def test_a_table_is_checked_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('"xid.74" = "fence"')
    assert hardware_flags.parse_hardware(given(eep_reactions="mine.toml"), "cpu").reactions == str(
        tmp_path / "mine.toml"
    )
    Path("mine.toml").write_text('"xid.74" = "explode"')
    with pytest.raises(SystemExit, match=r"--eep-reactions: mine\.toml: 'xid\.74' must be"):
        hardware_flags.parse_hardware(given(eep_reactions="mine.toml"), "cpu")


def test_the_watch_waits_for_a_supervisor(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert device_watcher.start_watching(tmp_path, HardwareOptions()) is None
    assert device_watcher.watch_command(tmp_path, HardwareOptions()) is None
    (tmp_path / "control.sock").touch()
    command = device_watcher.watch_command(tmp_path, HardwareOptions(reactions="/r.toml"))
    assert command is not None
    assert command[-4:] == ["--dir", str(tmp_path), "--reactions", "/r.toml"]


def test_a_kept_process_is_started_again_unless_it_has_nothing_to_do(tmp_path: Path) -> None:
    said = tmp_path / "said"
    program = f"open({str(said)!r}, 'a').write('x'); raise SystemExit(len(open({str(said)!r}).read()) < 2)"
    kept = KeptProcess("test", tmp_path, lambda: [sys.executable, "-c", program], ends_for_good=True)
    kept._thread.join(60)
    assert not kept._thread.is_alive()
    assert said.read_text() == "xx"
    kept.stop()
