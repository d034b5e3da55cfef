"""The Python mirrors against the layout that the library was compiled with, and against the numbers of the C headers."""

from __future__ import annotations

import ctypes
import inspect
import platform
import struct
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import pytest

from eep import faults
from eep.abi import collectives, functions, hosts, native, peer_table, structures
from eep.errors import EepError
from eep.faults.injection import ACTIONS
from tests.abi import headers

MIRRORS = {
    "eep_rank_set": peer_table.RankSet,
    "eep_peer": peer_table.Peer,
    "eep_peer_table": peer_table.PeerTable,
    "eep_snapshot": peer_table.Snapshot,
    "eep_control_page": peer_table.ControlPage,
    "eep_mailbox": native.Mailbox,
    "eep_shape": native.Shape,
    "eep_region_layout": native.RegionLayout,
    "eep_dispatch_send_args": native.DispatchSendArgs,
    "eep_dispatch_recv_args": native.DispatchRecvArgs,
    "eep_combine_send_args": native.CombineSendArgs,
    "eep_combine_recv_args": native.CombineRecvArgs,
    "eep_page_copy": structures.PageCopyArgs,
    "eep_group": collectives.Group,
    "eep_collective_args": collectives.CollectiveArgs,
    "eep_block_stamps": native.BlockStamps,
    "eep_message": collectives.MessageHeader,
    "eep_lane_mailbox": collectives.LaneMailbox,
    "eep_area": hosts.Area,
    "eep_link_secret": hosts.LinkSecret,
    "eep_link_offer": hosts.LinkOffer,
    "eep_remote_peer": hosts.RemotePeer,
    "eep_signal": hosts.Signal,
}


def compiled_layout() -> dict[str, tuple[int, int]]:
    count = ctypes.c_uint32()
    fields = native.load().eep_abi_fields(count)
    return {fields[i].name.decode(): (fields[i].offset, fields[i].size) for i in range(count.value)}


@pytest.mark.parametrize("name", MIRRORS)
def test_every_field_is_where_the_library_has_it(name: str) -> None:
    compiled = compiled_layout()
    mirror = MIRRORS[name]
    assert compiled[name] == (0, ctypes.sizeof(mirror))
    # "in" is a word of Python's own.
    fields = {name.rstrip("_"): name for name, _ in mirror._fields_ if not name.startswith("reserved")}
    ours = {field: getattr(mirror, name) for field, name in fields.items()}
    theirs = {key.split(".")[1]: at for key, at in compiled.items() if key.startswith(f"{name}.")}
    assert {field: (at.offset, at.size) for field, at in ours.items()} == theirs


@pytest.mark.parametrize(
    ("name", "mirrored"),
    [
        ("MAX_RANKS", peer_table.MAX_RANKS),
        ("MAX_CUDA_RANKS", peer_table.MAX_CUDA_RANKS),
        ("RANK_WORDS", peer_table.RANK_WORDS),
        ("MAX_CHANNELS", peer_table.MAX_CHANNELS),
        ("MAX_LANES", peer_table.MAX_LANES),
        ("INCARNATIONS", peer_table.INCARNATIONS),
        ("MAX_TOPK", native.MAX_TOPK),
        ("MAX_TOKENS", native.MAX_TOKENS),
        ("SCALE_GROUP", native.SCALE_GROUP),
        ("STATIONS", len(native.BlockStamps.STATIONS)),
        ("STATIONS", len(native.BlockStamps.COMBINE_STATIONS)),
        ("STAMPED_BLOCKS", native.STAMPED_BLOCKS),
        ("ABI_VERSION", native.ABI_VERSION),
        ("MAX_AREAS", hosts.MAX_AREAS),
        ("TOKEN_BYTES", hosts.TOKEN_BYTES),
        ("ADDRESS_BYTES", hosts.ADDRESS_BYTES),
        ("SIGNAL_WORDS", hosts.SIGNAL_WORDS),
    ],
)
def test_constants_are_those_of_the_headers(name: str, mirrored: int) -> None:
    assert headers.constants()[name] == mirrored


def test_the_library_speaks_the_abi_of_this_package() -> None:
    assert native.load().eep_abi_version() == native.ABI_VERSION


def numbers(enumeration: type[IntEnum], prefix: str = "") -> dict[str, int]:
    return {prefix + member.name: int(member) for member in enumeration}


ENUMERATIONS = {
    "eep_layout": {f"LAYOUT_{name.upper()}": value for name, value in native.LAYOUTS.items()},
    "eep_type": {f"TYPE_{name.upper()}": value for name, value in native.TYPES.items()},
    "eep_status": numbers(structures.StatusBit, "STATUS_"),
    "eep_collective_kind": numbers(collectives.Kind),
    "eep_element": numbers(collectives.Element, "ELEMENT_"),
    "eep_reduction": numbers(collectives.Reduction),
    "eep_owner_state": numbers(collectives.OwnerState, "OWNER_"),
    "eep_transport": {
        "TRANSPORT_NONE": peer_table.TRANSPORT_NONE,
        "TRANSPORT_LOCAL": peer_table.TRANSPORT_LOCAL,
        "TRANSPORT_MAPPED": peer_table.TRANSPORT_MAPPED,
        "TRANSPORT_REMOTE": peer_table.TRANSPORT_REMOTE,
    },
    "eep_bench": {
        "BENCH_FIXED_MEMBERSHIP": native.BENCH_FIXED_MEMBERSHIP,
        "BENCH_STAMPS": native.BENCH_STAMPS,
        "BENCH_UNCHECKED": native.BENCH_UNCHECKED,
        "BENCH_UNCLOSED": native.BENCH_UNCLOSED,
        "BENCH_WIDE": native.BENCH_WIDE,
        "BENCH_AT_ONCE": native.BENCH_AT_ONCE,
        "BENCH_UNFENCED": native.BENCH_UNFENCED,
    },
    "eep_fault_action": {"FAULT_OFF": 0} | {f"FAULT_{name.upper()}": value for name, value in ACTIONS.items()},
    "eep_error": numbers(structures.ErrorCode),
}
NOT_MIRRORED = {"eep_phase", "eep_barrier_word"}


@pytest.mark.parametrize("name", ENUMERATIONS)
def test_enumerations_are_those_of_the_headers(name: str) -> None:
    assert headers.enumerations()[name] == ENUMERATIONS[name]


def test_every_enumeration_of_the_headers_is_compared() -> None:
    assert headers.enumerations().keys() == ENUMERATIONS.keys() | NOT_MIRRORED


def test_functions_are_those_of_the_header() -> None:
    declared = {name: len(arguments) for name, (_, arguments) in functions.PROTOTYPES.items()}
    assert declared == headers.functions()


def test_the_typed_face_has_every_function() -> None:
    methods = {name: method for name, method in vars(functions.NativeLibrary).items() if name.startswith("eep_")}
    taken = {name: len(inspect.signature(method).parameters) - 1 for name, method in methods.items()}
    assert taken == headers.functions()


def test_regions_are_laid_out_by_capacity() -> None:
    """Everything lies apart, inside the channel, and grows with the capacity alone."""
    shape = native.Shape(5, 7, 384, 3, 2, native.LAYOUTS["rank"], native.TYPES["bf16"], native.TYPES["bf16"], 2)
    at = native.RegionLayout()
    assert native.load().eep_region_layout_compute(shape, at) == 0
    rows = 2 * 5 * 7
    parts = [
        (at.mailboxes, 2 * 5 * ctypes.sizeof(native.Mailbox)),
        (at.outbox_stamp, 8),
        (at.topk_idx, rows * 3 * 4),
        (at.topk_weights, rows * 3 * 4),
        (at.rows, rows * 384 * 2),
        (at.scales, rows * 3 * 4),
        (at.outbox, rows * 384 * 2),
    ]
    for (begin, size), (following, _) in zip(parts, [*parts[1:], (at.channel_bytes, 0)], strict=True):
        assert begin + size <= following
    assert at.slots == 10
    assert at.total_bytes == 2 * at.channel_bytes


def test_fault_points_have_names() -> None:
    assert len(set(faults.points())) == len(faults.points())
    assert len(faults.kernel_points()) == 20
    with pytest.raises(ValueError, match="no fault point 'nowhere'"):
        faults.arm("nowhere", "kill")
    with pytest.raises(ValueError, match="kill, stop, sleep"):
        faults.arm(faults.points()[0], "explode")
    faults.arm(faults.points()[0], "kill")
    faults.disarm()


def test_a_missing_library_says_what_to_do() -> None:
    with pytest.raises(EepError, match="make build"):
        native._find("libeep_of_no_backend.so")
    with pytest.raises(ValueError, match="no data plane for device"):
        native.load("tpu")


def built_for(machine: int, big_endian: bool = False) -> bytes:
    """The first bytes of a library for a machine, by its number in ELF."""
    order = ">" if big_endian else "<"
    return b"\x7fELF\x02" + bytes([2 if big_endian else 1]) + bytes(10) + struct.pack(f"{order}HH", 3, machine)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the library of the CPU is looked for first."""
    monkeypatch.setenv("EEP_LIBRARY_DIR", str(tmp_path))
    native.load.cache_clear()
    yield tmp_path / "libeep_cpu.so"
    native.load.cache_clear()


@pytest.mark.parametrize(("number", "name"), [(62, "x86_64"), (183, "aarch64")])
def test_a_library_for_another_machine_says_so(number: int, name: str, library: Path) -> None:
    here = platform.machine()
    library.write_bytes(built_for(number))
    wanted = (
        f"was built for {name}, and this machine is {here}: run 'make native'" if name != here else "cannot be loaded"
    )
    with pytest.raises(EepError, match=wanted):
        native.load()


@pytest.mark.parametrize("content", [b"", b"no library", built_for(22, big_endian=True), built_for(999)])
def test_a_library_that_is_none_says_what_to_do(content: bytes, library: Path) -> None:
    library.write_bytes(content)
    with pytest.raises(EepError, match=r"libeep_cpu\.so .*run 'make native'"):
        native.load()
