"""How long a rank that leaves waits for the store of rank 0."""

from __future__ import annotations

import datetime
import socket
import threading
from typing import Any

import pytest
import torch.distributed as dist

from eep.process_group import launch_store
from eep.process_group.launch_store import LaunchStore
from tests.process_group.worlds import together


def tcp_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=30))


def test_it_waits_for_a_store_that_is_about_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_store, "_CLOSES_WITHIN_S", 3600.0)
    kept: list[Any] = [tcp_store()]
    watched = LaunchStore.behind(dist.PrefixStore("a", dist.PrefixStore("b", kept[0])), 1)
    assert watched is not None
    waiting = threading.Thread(target=watched.wait_until_closed, daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    kept.clear()
    waiting.join(20)
    assert not waiting.is_alive()


def test_it_does_not_wait_for_the_next_store_at_that_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_store, "_CLOSES_WITHIN_S", 3600.0)
    kept: list[Any] = [tcp_store()]
    port = kept[0].port
    watched = LaunchStore.behind(kept[0], 1)
    assert watched is not None
    kept.clear()
    with socket.create_server(("127.0.0.1", port)):
        together([watched.wait_until_closed])


def test_a_store_that_stays_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_store, "_CLOSES_WITHIN_S", 0.1)
    kept = tcp_store()
    watched = LaunchStore.behind(kept, 1)
    assert watched is not None
    together([watched.wait_until_closed])
    assert kept.num_keys() >= 0


def test_other_stores_and_rank_0_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = tcp_store()
    assert LaunchStore.behind(store, 0) is None
    assert LaunchStore.behind(dist.PrefixStore("a", dist.HashStore()), 1) is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert LaunchStore.behind(store, 1) is None
