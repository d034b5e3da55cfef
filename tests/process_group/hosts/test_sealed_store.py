"""How long the store of torch is held: until the ranks have left, or could not begin."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import eep
from eep.process_group.hosts.sealed_store import SealedStore
from tests.process_group.worlds import SOON

KEY = b"k" * 32


def wait_until_none_asks() -> None:
    end = time.monotonic() + SOON.total_seconds()
    while any(thread.name == "eep-store" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.005)


def test_what_was_asked_before_the_end_is_answered_and_nothing_after_it() -> None:
    store = SealedStore(dist.HashStore(), KEY, answers_within=600.0)
    store.put("name", b"record")
    assert store.get("name") == b"record"
    store.close()
    store.close()
    began = time.monotonic()
    with pytest.raises(eep.PeerUnreachable, match="not asked any more"):
        store.get("name")
    store.withdraw("name")
    assert time.monotonic() - began < SOON.total_seconds()
    wait_until_none_asks()


def test_a_rank_that_cannot_begin_lets_go_of_it(tmp_path: Path) -> None:
    place = tmp_path / "host"
    place.mkdir(mode=0o700)
    options = eep.pg.Options(host=eep.pg.Host("127.0.0.1", KEY), max_ranks=1, rendezvous=place)
    with pytest.raises(ValueError, match="more than max_ranks"):
        dist.init_process_group("eep", store=dist.HashStore(), rank=0, world_size=2, pg_options=options)
    wait_until_none_asks()
