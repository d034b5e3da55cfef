"""What EEP's routes need of one server, and how it is put together."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Request

from eep.console.server_files import write_files
from eep.control.private_directory import PrivateDirectory
from eep.hardware.evidence_desk import EvidenceDesk
from eep.hardware.rank_device import read_devices
from eep.hardware.reaction_table import read_table
from eep.observe.event_feed import EventFeed, follow_log
from eep.operations.operation_runner import OperationRunner
from sglang_patches.api.callers import why_not_trusted
from sglang_patches.api.event_stream import EventStreams
from sglang_patches.api.rank_devices import device_of
from sglang_patches.api.server_access import ServerAccess
from sglang_patches.api.server_status import ServerStatus
from sglang_patches.front_end import server_end, tokenizer_hooks
from sglang_patches.options import DIRECTORY, required


@dataclass
class ServedApi:
    """What the routes of one server need."""

    directory: Path
    manager: Any
    status: ServerStatus
    runner: OperationRunner
    streams: EventStreams
    desk: EvidenceDesk
    has_key: bool
    token: str = ""
    """By which callers of the server's user on this host are known."""
    follows: bool = False

    def why_not_trusted(self, request: Request) -> str | None:
        client = request.client.host if request.client else None
        headers = {name.lower(): value for name, value in request.headers.items()}
        return why_not_trusted(client, headers, has_key=self.has_key, token=self.token)

    def follow(self) -> EventFeed:
        """The feed of events, which is filled from the first request for it on."""
        if not self.follows:
            self.follows, loop = True, asyncio.get_running_loop()
            path = PrivateDirectory(self.directory).events
            follow_log(path, lambda line: _told(loop.call_soon_threadsafe(self.streams.feed.add, line)))
        return self.streams.feed


def _told(_: object) -> None:
    return None


def serve(server_args: Any, manager: Any) -> ServedApi:
    directory = Path(os.environ[DIRECTORY])

    def front_end() -> Any:
        return tokenizer_hooks.front_end_of(manager)

    def woken() -> Any:
        manager.auto_create_handle_loop()  # before its first request there is no front end
        return front_end()

    def loads() -> list[Any]:
        reader = getattr(manager, "load_snapshot_reader", None)
        return [] if reader is None else list(reader.read_all())

    name_of, wanted = device_of(server_args), required()
    own_names = (socket.gethostname(), wanted.host_name)

    def devices() -> dict[int, tuple[str, ...]]:
        known = read_devices(directory)
        return {rank: (name_of(rank), *([known[rank]] if rank in known else [])) for rank in range(wanted.max_ranks)}

    status = ServerStatus(
        directory,
        front_end,
        loads,
        name_of,
        has_metrics=bool(server_args.enable_metrics),
        masks=wanted.masks,
    )
    runner = OperationRunner(ServerAccess(directory, status, woken))
    table = read_table(None if wanted.hardware.reactions is None else Path(wanted.hardware.reactions))
    return ServedApi(
        directory,
        manager,
        status,
        runner,
        EventStreams(EventFeed(secrets.token_hex(4)), lambda: server_end.why_ending() is not None),
        EvidenceDesk(directory, table, runner, devices, own_names),
        has_key=bool(server_args.api_key or getattr(server_args, "admin_api_key", None)),
        token=_say_where(directory, server_args),
    )


def _say_where(directory: Path, server_args: Any) -> str:
    """For ``eep``, which finds the directory by itself."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(server_args.host, server_args.host)
    certificate = getattr(server_args, "ssl_certfile", None)
    url = f"{'https' if certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{server_args.port}"
    return write_files(directory, url, Path(certificate) if certificate else None)
