"""The words of ``eep status``, ``eep events``, ``eep rank``, ``eep scale``, ``eep drain`` and ``eep undrain``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from eep.console.event_follower import follow_events
from eep.console.live_view import watch, with_absence
from eep.console.operation_command import operate
from eep.console.printable import printable, printable_within
from eep.console.rank_argument import rank_count, rank_number, seconds_up_to
from eep.console.server_choice import ServerChoice, add_server, directory_of
from eep.console.status_table import Paint, colored, plain, render_status, style_of
from eep.observe.event_log import EventLine, fields_of, read_lines
from eep.operations.operation_request import LONGEST_S

LOOKS_EVERY = 0.2
_LONGEST_LOOK_S = 86400.0


def register(commands: Any) -> None:
    events = commands.add_parser("events", help="print the event log of a server")
    events.add_argument("--follow", action="store_true", help="keep printing new lines until the server ends")
    events.add_argument("--json", action="store_true", help="print the lines as JSON, as they are in the log")
    events.set_defaults(run=_events)
    status = commands.add_parser("status", help="show the state of a server, its ranks, and what it waits for")
    status.add_argument("--json", action="store_true", help="print all that is known, for programs")
    status.add_argument(
        "--watch",
        nargs="?",
        type=seconds_up_to(_LONGEST_LOOK_S),
        const=1.0,
        metavar="SECONDS",
        help="show it again and again",
    )
    status.set_defaults(run=_status)
    rank = commands.add_parser("rank", help="take a rank out, bring it back, replace it, kill it, or change its role")
    rank.add_argument("action", choices=("remove", "launch", "replace", "kill", "role"))
    rank.add_argument("rank", type=rank_number)
    rank.add_argument("role", nargs="?", choices=("experts", "both"), help="for role: experts only, or requests too")
    scale = commands.add_parser("scale", help="have so many ranks")
    scale.add_argument("ranks", type=rank_count, help="how many there are to be")
    drain = commands.add_parser("drain", help="accept no new requests, and wait until none is open")
    undrain = commands.add_parser("undrain", help="accept requests again")
    rank.set_defaults(run=_rank)
    for command, action in ((scale, "scale"), (drain, "drain"), (undrain, "undrain")):
        command.set_defaults(run=operate, action=action, rank=None)
    for command in (rank, scale, drain, undrain):
        command.add_argument("--operation", default="", help="name of the request; repeating a name does nothing twice")
        command.add_argument(
            "--within", type=seconds_up_to(LONGEST_S), default=600.0, help="seconds after which it has failed (600)"
        )
    rank.add_argument("--wait", action="store_true", help="until it is done; without, it is only asked for")
    for command in (drain, undrain, scale):
        command.set_defaults(wait=True)
    for command in (events, status, rank, scale, drain, undrain):
        add_server(command)


def _paint() -> Paint:
    return colored if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else plain


def _status(options: argparse.Namespace) -> int:
    chosen: Path | None = None

    def look() -> str:
        nonlocal chosen
        if not options.url and (chosen is None or not chosen.exists()):
            chosen = directory_of(options)  # it stays the one, whatever other server starts
        status = ServerChoice.of(options, chosen).status()
        return (
            json.dumps(status, indent=2)
            if options.json
            else render_status(printable_within(status), time.time(), _paint())
        )

    def absence(_: str, since: float, why: str) -> str:
        return json.dumps({"no_answer_since": since, "why": why})

    if options.watch is not None:
        watch(look, max(LOOKS_EVERY, options.watch), absence if options.json else with_absence)
    print(look())
    return 0


def _events(options: argparse.Namespace) -> int:
    paint = _paint()
    for line in _lines(options):
        if options.json:
            print(line, flush=True)
        else:
            event = EventLine(**fields_of(line))
            print(paint(printable(str(event)), style_of(event.phase)), flush=True)
    return 0


def _lines(options: argparse.Namespace) -> Iterator[str]:
    if options.url:
        api = ServerChoice.of(options).api
        assert api is not None
        if options.follow:
            yield from follow_events(api, lambda why: print(f"eep: {why}", file=sys.stderr, flush=True))
        else:
            for event in api.get("/eep/events?follow=false", shape=list[dict[str, Any]]):
                event.pop("id", None)
                yield json.dumps(event)
        return
    wait = partial(time.sleep, LOOKS_EVERY) if options.follow else None
    yield from (line.rstrip() for line in read_lines(directory_of(options) / "events.jsonl", wait))


def _rank(options: argparse.Namespace) -> int:
    options.ranks = None
    if (options.action == "role") is (options.role is None):
        raise ValueError("'eep rank role R' takes a role, experts or both, and no other action takes one")
    options.wait = options.wait or options.action in ("replace", "role")
    return operate(options)
