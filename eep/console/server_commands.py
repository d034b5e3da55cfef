"""``eep status``, ``eep events``, ``eep rank``, ``eep scale``, ``eep drain`` and ``eep undrain``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from eep.console.server_choice import ServerChoice, add_server, directory_of
from eep.console.status_table import Paint, colored, plain, render_status, style_of
from eep.observe.event_log import parse_line, read_lines

LOOKS_EVERY = 0.2
FAILED, UNFINISHED = 3, 4
"""Exit codes of operations."""
_LONGEST_QUESTION = 50.0
_CLEAR = "\x1b[H\x1b[2J"


def register(commands: Any) -> None:
    events = commands.add_parser("events", help="print the event log of a server")
    events.add_argument("--follow", action="store_true", help="keep printing new lines until the server ends")
    events.add_argument("--json", action="store_true", help="print the lines as JSON, as they are in the log")
    events.set_defaults(run=_events)
    status = commands.add_parser("status", help="show the state of a server, its ranks, and what it waits for")
    status.add_argument("--json", action="store_true", help="print all that is known, for programs")
    status.add_argument("--watch", nargs="?", type=float, const=1.0, metavar="SECONDS", help="show it again and again")
    status.set_defaults(run=_status)
    rank = commands.add_parser("rank", help="take a rank out, bring it back, replace it, or kill it")
    rank.add_argument("action", choices=("remove", "launch", "replace", "kill"))
    rank.add_argument("rank", type=int)
    scale = commands.add_parser("scale", help="have so many ranks")
    scale.add_argument("ranks", type=int, help="how many there are to be")
    drain = commands.add_parser("drain", help="accept no new requests, and wait until none is open")
    undrain = commands.add_parser("undrain", help="accept requests again")
    rank.set_defaults(run=_rank)
    for command, action in ((scale, "scale"), (drain, "drain"), (undrain, "undrain")):
        command.set_defaults(run=_operate, action=action, rank=None)
    for command in (rank, scale, drain, undrain):
        command.add_argument("--operation", default="", help="name of the request; repeating a name does nothing twice")
        command.add_argument("--within", type=float, default=600.0, help="seconds after which it has failed (600)")
    rank.add_argument("--wait", action="store_true", help="until it is done; without, it is only asked for")
    for command in (drain, undrain, scale):
        command.set_defaults(wait=True)
    for command in (events, status, rank, scale, drain, undrain):
        add_server(command)


def _paint() -> Paint:
    return colored if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else plain


def _status(options: argparse.Namespace) -> int:
    server = ServerChoice.of(options)
    while True:
        status = server.status()
        text = json.dumps(status, indent=2) if options.json else render_status(status, time.time(), _paint())
        if options.watch is None:
            print(text)
            return 0
        print(f"{_CLEAR if sys.stdout.isatty() else ''}{text}", flush=True)
        time.sleep(max(LOOKS_EVERY, options.watch))


def _events(options: argparse.Namespace) -> int:
    paint = _paint()
    for line in _lines(options):
        if options.json:
            print(line, flush=True)
        else:
            event = parse_line(line)
            print(paint(str(event), style_of(event.phase)), flush=True)
    return 0


def _lines(options: argparse.Namespace) -> Iterator[str]:
    if options.url:
        api = ServerChoice.of(options).api
        assert api is not None
        if options.follow:
            yield from (line for _, line in api.events(""))
        else:
            for event in api.get("/eep/events?follow=false"):
                del event["id"]
                yield json.dumps(event)
        return
    wait = partial(time.sleep, LOOKS_EVERY) if options.follow else None
    yield from (line.rstrip() for line in read_lines(directory_of(options) / "events.jsonl", wait))


def _rank(options: argparse.Namespace) -> int:
    options.ranks = None
    if options.wait or options.url or options.action == "replace":
        return _operate(options)
    from eep.control.wire.client import ask_supervisor
    from eep.control.wire.messages import AskOperation

    name = options.operation or uuid.uuid4().hex
    answer = ask_supervisor(directory_of(options), AskOperation(name, options.action, options.rank))
    if not answer.ok:
        raise ValueError(answer.body)
    print(f"asked to {options.action} rank {options.rank}; operation {name}")
    return 0


def _operate(options: argparse.Namespace) -> int:
    """Ask for an operation, and say how it goes until it has ended."""
    from eep.operations.operation_request import OperationRequest, check_request

    ranks = getattr(options, "ranks", None)
    request = {
        "id": options.operation or uuid.uuid4().hex,
        "action": options.action,
        **({} if options.rank is None else {"rank": options.rank}),
        **({} if ranks is None else {"ranks": ranks}),
        "deadline_s": options.within,
    }
    server = ServerChoice.of(options)
    if server.directory is None or options.action in ("drain", "undrain"):
        if server.api is None:
            raise ValueError("the server does not say where it serves HTTP; give --url")
        told = _ask_api(server, request)
    else:
        import msgspec

        told = _ask_supervisor(server.directory, check_request(msgspec.convert(request, OperationRequest)))
    print(f"{told['state']}: {told['reason']}")
    if told["undone"]:
        print(f"taken back: {', '.join(told['undone'])}")
    return {"done": 0, "failed": FAILED}.get(told["state"], UNFINISHED)


def _ask_api(server: ServerChoice, request: dict[str, Any]) -> dict[str, Any]:
    assert server.api is not None
    end, said = time.monotonic() + request["deadline_s"] + 5, ""
    while True:
        # The same question again and again: the id sees to it that it is done once.
        told: dict[str, Any] = server.api.post("/eep/apply?wait=1", request, _LONGEST_QUESTION)
        if told["state"] in ("done", "failed") or time.monotonic() > end:
            return told
        if told["reason"] != said:
            said = told["reason"]
            print(f"{told['state']}: {said}", flush=True)


def _ask_supervisor(directory: Path, request: Any) -> dict[str, Any]:
    """Carry it out from here, by the supervisor of the directory."""
    from eep.operations.operation_runner import OperationRunner
    from eep.operations.supervisor_access import SupervisorAccess

    async def run() -> dict[str, Any]:
        runner = OperationRunner(SupervisorAccess(directory))
        operation, said = runner.submit(request)[0], ""
        while runner.table.unfinished():
            if operation.reason != said:
                said = operation.reason
                print(f"{operation.state}: {said}", flush=True)
            await asyncio.sleep(LOOKS_EVERY / 4)
        return operation.describe()

    return asyncio.run(run())
