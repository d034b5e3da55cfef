"""``eep anchor``: weights that outlive a server."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``anchor`` to the commands of ``eep``. What it needs is imported when it runs."""
    anchor = commands.add_parser("anchor", help="hold the weights of servers that come and go")
    actions = anchor.add_subparsers(required=True, metavar="serve|status|release")
    serve = actions.add_parser("serve", help="hold what servers with --eep-anchor DIR put there, until SIGTERM")
    serve.set_defaults(run=_serve)
    status = actions.add_parser("status", help="print what is held")
    status.add_argument("--json", action="store_true", help="print it as JSON")
    status.set_defaults(run=_status)
    release = actions.add_parser(
        "release", help="let go of what is held; a server that runs keeps what it uses, and has it held again"
    )
    release.set_defaults(run=_release)
    for each in (serve, status, release):
        each.add_argument("--dir", required=True, type=Path, help="the directory of the anchor; private to this user")


def _serve(options: argparse.Namespace) -> int:
    from eep.anchor.daemon import serve

    serve(options.dir)
    return 0


def _status(options: argparse.Namespace) -> int:
    from eep.anchor.anchor import list_held

    held = list_held(options.dir)
    if options.json:
        print(json.dumps([asdict(each) for each in held]))
        return 0
    for each in held:
        owner = "shared" if each.rank < 0 else f"rank {each.rank}"
        print(f"{owner:8} {each.name:48} {each.size / 2**20:12.1f} MiB")
    print(f"{len(held)} pieces, {sum(each.size for each in held) / 2**20:.1f} MiB")
    return 0


def _release(options: argparse.Namespace) -> int:
    from eep.anchor.anchor import drop, list_held

    held = list_held(options.dir)
    for each in held:
        drop(options.dir, each.rank, each.incarnation, each.name)
    print(f"let go of {len(held)} pieces, {sum(each.size for each in held) / 2**20:.1f} MiB")
    return 0
