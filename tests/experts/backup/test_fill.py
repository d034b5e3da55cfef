"""How a backup gets one expert: from a copy whose bytes are right, over a transport made for the occasion."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from eep.data_plane.memory.shm import SharedMemory
from eep.experts.backup.fill import ExpertCopy, fetch_copy
from eep.experts.backup.transport import TransferFailed, Transport
from eep.experts.layout import checksum

BYTES = torch.arange(10, dtype=torch.uint8)
SUM = checksum([BYTES])


class ReadTransport(Transport):
    """Reads ``BYTES`` from any session, except from the one that is gone and the one whose owner has changed them."""

    session = "here"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def expose(self, memory: SharedMemory) -> int:
        raise NotImplementedError

    def withdraw(self, address: int) -> None:
        raise NotImplementedError

    def read(self, session: str, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        self.asked.append(session)
        if session == "gone":
            raise TransferFailed("no process answers")
        for address, target in parts:
            target.copy_(BYTES[address : address + target.numel()])
            if session == "changed":
                target ^= 1


def copy_at(owner: str) -> ExpertCopy:
    return ExpertCopy(owner, ((0, 6), (6, 4)), SUM)


@pytest.mark.parametrize("trouble", ["gone", "changed"])
def test_trouble_with_one_copy_is_made_good_by_another(trouble: str) -> None:
    transport, target = ReadTransport(), torch.zeros_like(BYTES)
    assert fetch_copy(transport, 0, [copy_at(trouble), copy_at("right")], target) == SUM
    assert transport.asked == [trouble, "right"]
    assert torch.equal(target, BYTES)


def test_no_checksum_is_given_where_no_copy_is_right() -> None:
    transport = ReadTransport()
    copies = [copy_at("gone"), copy_at("changed")]
    assert fetch_copy(transport, 0, copies, torch.zeros_like(BYTES)) is None
    assert transport.asked == ["gone", "changed"]


def test_owners_of_copies_share_the_work() -> None:
    transport, copies = ReadTransport(), [copy_at("right"), copy_at("too")]
    for number in range(4):
        assert fetch_copy(transport, number, copies, torch.zeros_like(BYTES)) == SUM
    assert transport.asked == ["right", "too", "right", "too"]
