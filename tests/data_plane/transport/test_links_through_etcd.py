"""Ranks of two hosts find each other through the store of the control plane."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import eep
from eep.control.store.etcd_store import EtcdStore
from eep.control.store.record_seal import RecordSeal
from eep.data_plane.transport.remote_hosts import RemoteHosts
from eep.experts.registry.store_registry import StoreRegistry
from tests import moe
from tests.control.store import etcd_cluster
from tests.data_plane.transport.requirements import why_no_links

KEY = b"e" * 32
CONFIG = moe.Config(ranks=2, max_ranks=2)

_reason = etcd_cluster.why_not() or why_no_links()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))


@pytest.fixture
def registries(tmp_path: pathlib.Path) -> Iterator[list[StoreRegistry]]:
    cluster = etcd_cluster.EtcdCluster(tmp_path, nodes=1)
    made = [StoreRegistry(lambda: EtcdStore(cluster.endpoints, "job", seal=RecordSeal(KEY))) for _ in range(2)]
    yield made
    for registry in made:
        registry.close()
    cluster.close()


def test_ranks_find_each_other_through_etcd(registries: list[StoreRegistry], tmp_path: pathlib.Path) -> None:
    buffers = [
        CONFIG.buffer(
            rank,
            str(tmp_path / f"host{rank}"),
            timeout_ms=60_000,
            hosts=RemoteHosts(frozenset({1 - rank}), "127.0.0.1", registries[rank], KEY),
        )
        for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as both:
        view = eep.View(1, (0, 1), (0, 0))
        assert list(both.map(lambda buffer: buffer.apply_view(view), buffers)) == [view, view]
        outputs = both.map(lambda buffer: moe.step(buffer, CONFIG, 5, (0, 1)), buffers)
        for rank, output in enumerate(outputs):
            assert torch.equal(output, moe.reference(CONFIG, moe.make_batch(CONFIG, rank, 5, (0, 1))))
            assert buffers[rank].is_ok
    assert set(registries[0].scan("links/")) == {"links/0.0/1.0", "links/1.0/0.0"}
    for buffer in buffers:
        buffer.close()
    assert "links/0.0/1.0" not in registries[0].scan("links/")
