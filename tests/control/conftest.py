"""What the tests of the control plane share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.control.store.etcd_cluster import EtcdCluster, why_not


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """A three-node cluster for the whole run; a test that hurts a node heals it before it ends."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.close()
