from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.data_plane.transport.requirements import why_no_links
from tests.process_group.hosts.host_members import HostMembers, HostsConfig, StoreMembers


@pytest.fixture(autouse=True)
def _links() -> None:
    if (reason := why_no_links()) is not None:
        pytest.skip(reason)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., HostMembers]]:
    """Starts members on hosts, as ``hosts`` says; they end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*hosts: int, timeout_ms: float = 60_000, provider: str = "tcp", **config: int) -> HostMembers:
            path = tmp_path / "ranks"
            path.mkdir(mode=0o700, exist_ok=True)
            made = HostsConfig(size=len(hosts), hosts=hosts, provider=provider, **config)  # type: ignore[arg-type]
            members = stack.enter_context(HostMembers(path, made, timeout_ms))
            members.begin()
            return members

        yield start


@pytest.fixture
def agreeing(tmp_path: Path) -> Iterator[Callable[..., StoreMembers]]:
    """The same for members that agree among themselves."""
    stores: list[dist.TCPStore] = []
    with contextlib.ExitStack() as stack:

        def start(*hosts: int, timeout_ms: float = 60_000, begins: bool = True, **config: int) -> StoreMembers:
            path = tmp_path / "ranks"
            path.mkdir(mode=0o700, exist_ok=True)
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            stores.append(store)
            made = HostsConfig(**({"size": len(hosts)} | config), hosts=hosts, store=store.port)  # type: ignore[arg-type]
            members = stack.enter_context(StoreMembers(path, made, timeout_ms))
            if begins:
                members.begin()
            return members

        yield start
