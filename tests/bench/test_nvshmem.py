"""The exchange through NVSHMEM: what is found, built, laid out and refused, which needs neither the package nor a GPU."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shutil
import sys
from pathlib import Path

import pytest

from bench.exchange import contest
from bench.exchange.cuda_rank import Case
from bench.exchange.nvshmem import put_library
from bench.exchange.nvshmem.pes import SymmetricMemory, symmetric_memory, variables
from bench.exchange.nvshmem.put_contender import PutPlaces, heap_bytes_of
from bench.exchange.nvshmem.put_library import WAYS, PutExchange, build_puts, find_nvshmem, version_of

SOURCE = Path(put_library.__file__).with_name("puts.cu").read_text()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with the names of the package's files."""
    for name in put_library._NEEDED:
        (tmp_path / "nvshmem" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "nvshmem" / name).touch()
    parts = {"MAJOR": 3, "MINOR": 4, "PATCH": 5}
    (tmp_path / "nvshmem/include/non_abi/nvshmem_version.h").write_text(
        "".join(f"#define NVSHMEM_VENDOR_{part}_VERSION {number}\n" for part, number in parts.items())
    )
    return tmp_path / "nvshmem"


def test_a_complete_package_is_taken(package: Path) -> None:
    assert find_nvshmem(package) == package
    assert version_of(package) == "3.4.5"


@pytest.mark.parametrize("name", put_library._NEEDED)
def test_what_the_package_lacks_is_named(package: Path, name: str) -> None:
    (package / name).unlink()
    with pytest.raises(SystemExit, match=rf"--nvshmem {re.escape(str(package))}: there is no {re.escape(name)}; "):
        find_nvshmem(package)


def test_without_the_package_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"^--nvshmem: nvidia-nvshmem-cu13 is not installed; install it, or name "):
        find_nvshmem(None)


def test_the_installed_package_is_found(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site/nvidia").mkdir(parents=True)
    package.rename(tmp_path / "site/nvidia/nvshmem")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in [name for name in sys.modules if name.split(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    assert find_nvshmem(None) == tmp_path / "site/nvidia/nvshmem"


def test_without_nvcc_one_sentence_says_so(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="there is no nvcc"):
        build_puts(package, tmp_path / "build")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_what_nvcc_says_is_told(package: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"nvcc failed:\n.*error"):
        build_puts(package, tmp_path / "build")
    assert not list((tmp_path / "build").glob("*.so"))


def test_the_structure_is_that_of_the_source() -> None:
    body = re.search(r"struct PutExchange \{(.*?)\};", SOURCE, re.DOTALL)
    assert body
    names: list[str] = []
    for declared in body[1].split(";")[:-1]:
        kind, _, rest = re.sub(r"\bconst\b", "", declared).strip().partition(" ")
        assert kind.rstrip("*") in ("int32_t", "uint64_t", "float", "void")
        names += [name.strip(" *") for name in rest.split(",")]
    assert names == [field[0] for field in PutExchange._fields_]


def test_the_ways_are_those_of_the_source() -> None:
    body = re.search(r"enum Way \{(.*?)\};", SOURCE, re.DOTALL)
    assert body
    words = [
        re.sub(r"(?<=.)([A-Z])", r" \1", name).lower() for name in re.findall(r"^\s*k(\w+),", body[1], re.MULTILINE)
    ]
    assert tuple(words) == WAYS
    assert {given["way"] for given in contest.NVSHMEM.values()} == set(WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_places_do_not_overlap(way: str) -> None:
    case = Case(ranks=4, tokens=3, hidden=7168, way=way)
    at = PutPlaces.of(case)
    choices, rows = 4 * 3 * 8 * 4, 4 * 3 * 7168 * 2
    sizes = (32, 32, 8, choices, choices, rows, rows, 0 if way == "stores" else rows)
    offsets = [getattr(at, name) for name in PutPlaces.__dataclass_fields__]
    assert offsets[0] == 0
    assert all(offset % 16 == 0 for offset in offsets)
    for (begin, end), size in zip(itertools.pairwise(offsets), sizes, strict=True):
        assert size <= end - begin < size + 128
    assert heap_bytes_of([case, case]) == 2 * at.end


def test_memory_is_a_stack() -> None:
    memory = SymmetricMemory(1000, 100)
    assert [memory.take(60), memory.take(40)] == [1000, 1060]
    with pytest.raises(MemoryError, match="1 bytes of the symmetric heap are asked for, and 0 are left"):
        memory.take(1)
    memory.give_back(40)
    assert memory.take(40) == 1060


def test_a_process_that_is_no_pe_has_no_symmetric_memory() -> None:
    with pytest.raises(RuntimeError, match="has not been started as a PE"):
        symmetric_memory()


def test_the_heap_has_room_for_the_largest_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["contest", "--wires", "bf16", "--ranks", "8,4", "--tokens", "1,128", "--nvshmem"]
    monkeypatch.setattr(sys, "argv", asked)
    most = contest.most_heap_bytes(contest.parse())
    assert most > 8 * 8 * 128 * 7168 * 2  # three workspaces of two or three buffers
    assert int(variables(most)["NVSHMEM_SYMMETRIC_SIZE"]) > most


def test_rows_of_fp8_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["contest", "--nvshmem"])
    with pytest.raises(SystemExit):
        contest.parse()
    assert "--nvshmem measures rows of bf16 alone; say --wires bf16" in capsys.readouterr().err
