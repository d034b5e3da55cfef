"""The Python mirrors against the layout that the library was compiled with, and the two copies of its constants."""

from __future__ import annotations

import ctypes
import pathlib
import re

import pytest

from eep import faults
from eep.abi import collectives, native, peer_table
from eep.errors import EepError

ROOT = pathlib.Path(__file__).parents[2]
MIRRORS = {
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
    "eep_group": collectives.Group,
    "eep_collective_args": collectives.CollectiveArgs,
    "eep_block_stamps": native.BlockStamps,
    "eep_message": collectives.MessageHeader,
    "eep_lane_mailbox": collectives.LaneMailbox,
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


def test_constants_are_those_of_the_headers() -> None:
    headers = "".join((ROOT / "eep_cuda/include/eep" / f"{name}.h").read_text() for name in ("peer_table", "protocol"))
    values = {name: int(value) for name, value in re.findall(r"#define EEP_(\w+) (\d+)\b(?!u?ll)", headers)}
    assert values["MAX_RANKS"] == peer_table.MAX_RANKS
    assert values["MAX_CHANNELS"] == peer_table.MAX_CHANNELS
    assert values["MAX_LANES"] == peer_table.MAX_LANES
    assert values["INCARNATIONS"] == peer_table.INCARNATIONS
    assert values["MAX_TOPK"] == native.MAX_TOPK
    assert values["MAX_TOKENS"] == native.MAX_TOKENS
    assert values["SCALE_GROUP"] == native.SCALE_GROUP
    assert values["ABI_VERSION"] == native.ABI_VERSION == native.load().eep_abi_version()
    enums = {name: int(value) for name, value in re.findall(r"EEP_(\w+) = (\d+)", headers)}
    assert {name: enums[f"LAYOUT_{name.upper()}"] for name in native.LAYOUTS} == native.LAYOUTS
    assert {name: enums[f"TYPE_{name.upper()}"] for name in native.TYPES} == native.TYPES


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
    assert len(faults.kernel_points()) == 17
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
