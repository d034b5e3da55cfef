"""Dispatch and combine over verbs: two guests with soft-RoCE, of which one is lost and returns as another life.

The test is the registry and the control plane of the two: it hands offers and secrets from one to the other, and says
which ranks a view has.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from eep.abi.structures import StatusBit
from eep.data_plane.transport.link_records import KEY_BYTES, NONCE_BYTES, LinkEnd, link_name, secret_of
from tests.rdma.guest import Guest, emulator
from tests.rdma.guest_image import BUSYBOX, RDMA, GuestImage, build_image

ROUNDS = 20
BOTH = 0b11
ENDLESS = 1_000_000
NOTICED_WITHIN = 180.0


@pytest.fixture(scope="module")
def image() -> GuestImage:
    if absent := [tool for tool in (emulator(), str(BUSYBOX), str(RDMA)) if shutil.which(tool) is None]:
        pytest.skip(f"{', '.join(absent)}: not installed; 'make test-rdma' does it")
    return build_image()


@pytest.fixture
def guests(image: GuestImage, tmp_path: Path) -> Iterator[GuestRoom]:
    with ExitStack() as ends:
        yield GuestRoom(image, tmp_path, ends)


class GuestRoom:
    """Boots guests, and ends them with the test."""

    def __init__(self, image: GuestImage, directory: Path, ends: ExitStack) -> None:
        self._image, self._directory, self._ends = image, directory, ends

    def boot(self, rank: int, incarnation: int) -> Guest:
        guest = Guest(self._image, self._directory, rank, incarnation)
        self._ends.callback(guest.kill)
        return guest


def link(left: Guest, right: Guest) -> None:
    """A link between these two lives, with secrets as the ranks of an instance make them."""
    key = os.urandom(KEY_BYTES)
    offers, secrets = {}, {}
    for own, peer in ((left, right), (right, left)):
        name = link_name(LinkEnd(own.rank, own.incarnation), LinkEnd(peer.rank, peer.incarnation))
        secrets[own.rank] = bytes(secret_of(key, name, os.urandom(NONCE_BYTES))).hex()
        own.say("invite", peer.rank, peer.incarnation, secrets[own.rank])
        offers[own.rank] = own.expect("offer")
    for own, peer in ((left, right), (right, left)):
        own.say("connect", offers[peer.rank], secrets[peer.rank])
    for guest in (left, right):
        guest.expect("up")


def enter_view(epoch: int, ranks: int, *guests: Guest) -> None:
    for guest in guests:
        guest.say("view", epoch, ranks)
    for guest in guests:
        guest.expect("view")


def take_rounds(count: int, *guests: Guest) -> None:
    """Each rank compares what it gets back with what it must be, bit for bit."""
    for guest in guests:
        guest.say("rounds", count)
    for guest in guests:
        for _ in range(count):
            assert "exact" in guest.expect("round")
        guest.expect("done")


def packets(guest: Guest) -> int:
    guest.say("packets")
    return int(guest.expect("packets"))


def loss_after_exact_rounds(guest: Guest) -> str:
    """The rounds that were under way may have been exact; then one is lost, and the guest takes no other."""
    while "exact" in (said := guest.expect("round", NOTICED_WITHIN)):
        pass
    guest.expect("done")
    return said


@pytest.mark.timeout(1200)
def test_a_guest_that_is_lost_and_returns_exchanges_tokens_over_verbs(guests: GuestRoom) -> None:
    survivor, lost = guests.boot(0, 0), guests.boot(1, 0)
    for guest in (survivor, lost):
        guest.wait_until_ready()
    link(survivor, lost)
    enter_view(1, BOTH, survivor, lost)
    take_rounds(ROUNDS, survivor, lost)
    assert packets(survivor) > ROUNDS, "tokens have crossed, and not over the soft-RoCE device"

    for guest in (survivor, lost):
        guest.say("rounds", ENDLESS)
    for _ in range(ROUNDS):
        assert "exact" in survivor.expect("round")
    lost.kill()
    returned = guests.boot(1, 1)  # beside what follows: a boot takes a while
    loss = loss_after_exact_rounds(survivor)
    print(f"the survivor said: round {loss}")
    assert f"lost, status {int(StatusBit.SUSPECT)}," in loss

    survivor.say("dismiss")
    survivor.expect("dismissed")
    enter_view(2, 1 << survivor.rank, survivor)
    take_rounds(3, survivor)

    returned.wait_until_ready()
    link(survivor, returned)
    enter_view(3, BOTH, survivor, returned)
    take_rounds(ROUNDS, survivor, returned)
