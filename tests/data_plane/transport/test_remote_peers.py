"""Two buffers of one process that take each other for ranks of another host, and a registry that fails."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import eep
from eep.abi.peer_table import TRANSPORT_LOCAL, TRANSPORT_NONE, TRANSPORT_REMOTE
from eep.data_plane.transport.remote_hosts import RemoteHosts
from tests import moe
from tests.data_plane.transport.requirements import why_no_links

CONFIG = moe.Config(ranks=2, max_ranks=2)
BOTH = eep.View(1, (0, 1), (0, 0))

_reason = why_no_links()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))


class Registry:
    """Records of all ranks of this process."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.fails = False
        self.may_withdraw = threading.Event()
        self.may_withdraw.set()

    def publish(self, key: str, value: bytes) -> None:
        if self.fails:
            raise eep.EepError("the store does not answer")
        self.records[key] = value

    def withdraw(self, key: str) -> None:
        self.may_withdraw.wait(30.0)
        self.records.pop(key, None)

    def scan(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self.records.items() if key.startswith(prefix)}


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def buffers(registry: Registry, tmp_path: pathlib.Path) -> Iterator[list[eep.Buffer]]:
    made = [
        CONFIG.buffer(
            rank,
            str(tmp_path / f"host{rank}"),
            timeout_ms=60_000,
            hosts=RemoteHosts(frozenset({1 - rank}), "127.0.0.1", registry, b"k" * 32),
        )
        for rank in range(2)
    ]
    yield made
    for buffer in made:
        buffer.close()


def apply_on_both(buffers: list[eep.Buffer], view: eep.View) -> None:
    with ThreadPoolExecutor(2) as both:
        assert list(both.map(lambda buffer: buffer.apply_view(view), buffers)) == [view, view]


def test_entries_say_how_a_rank_is_reached(buffers: list[eep.Buffer]) -> None:
    apply_on_both(buffers, BOTH)
    assert [peer.transport for peer in buffers[0].table.peers[:2]] == [TRANSPORT_LOCAL, TRANSPORT_REMOTE]
    assert buffers[0].peer_processes.keys() == {(1, 0)}
    assert not buffers[0].dead_peers()
    assert buffers[0].apply_view(eep.View(2, (0,), (0, 0))).active == (0,)
    assert [peer.transport for peer in buffers[0].table.peers[:2]] == [TRANSPORT_LOCAL, TRANSPORT_NONE]


def test_a_store_that_comes_back_is_asked_again(buffers: list[eep.Buffer], registry: Registry) -> None:
    registry.fails = True
    with pytest.raises(eep.PeerUnreachable, match="could not announce itself to it: the store does not answer"):
        buffers[0].apply_view(BOTH, timeout=0.05)
    registry.fails = False
    apply_on_both(buffers, BOTH)
    with ThreadPoolExecutor(2) as both:
        outputs = list(both.map(lambda buffer: moe.step(buffer, CONFIG, 3, (0, 1)), buffers))
    for rank, output in enumerate(outputs):
        assert torch.equal(output, moe.reference(CONFIG, moe.make_batch(CONFIG, rank, 3, (0, 1))))


def test_a_store_that_hangs_holds_up_no_view_without_a_rank(buffers: list[eep.Buffer], registry: Registry) -> None:
    apply_on_both(buffers, BOTH)
    registry.may_withdraw.clear()
    assert buffers[0].apply_view(eep.View(2, (0,), (0, 0))).active == (0,)
    assert buffers[0].is_ok
    registry.may_withdraw.set()


def test_the_end_of_a_link_does_not_take_the_record_of_the_next(buffers: list[eep.Buffer], registry: Registry) -> None:
    with pytest.raises(eep.PeerUnreachable, match="has not announced itself"):
        buffers[0].apply_view(BOTH, timeout=0.05)
    ended = registry.records["links/0.0/1.0"]
    registry.may_withdraw.clear()
    buffers[0].forget_prepared()
    with ThreadPoolExecutor(2) as threads:
        applied = [threads.submit(buffers[0].apply_view, BOTH)]
        registry.may_withdraw.set()
        # An end that finds the record of a link that has ended is told so, and has to apply the view again.
        while registry.records.get("links/0.0/1.0", ended) == ended:
            time.sleep(0.01)
        applied.append(threads.submit(buffers[1].apply_view, BOTH))
        assert [each.result() for each in applied] == [BOTH, BOTH]
    assert registry.records.keys() == {"links/0.0/1.0", "links/1.0/0.0"}


def test_what_cannot_be_done_across_hosts_says_so(buffers: list[eep.Buffer]) -> None:
    with pytest.raises(ValueError, match="say which incarnation"):
        buffers[0].connect_ranks([1])
    with pytest.raises(eep.EepError, match="apply the view"):
        buffers[0].join(timeout=0.1)
