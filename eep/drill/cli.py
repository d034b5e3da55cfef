"""``eep fault``: faults on purpose, from the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

ACTIONS = ("kill", "stop", "cont", "slow", "drill")


def register(commands: Any) -> argparse.ArgumentParser:
    """Adds the command; its ``--dir`` is added with that of the others."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "fault",
        help="kill, stop, wake or slow down a rank of a running server, or kill at random",
        description="Faults on purpose. The server must have been started with --eep-faults on, and whoever asks must be "
        "able to read the key in its private directory.",
    )
    parser.add_argument("action", choices=ACTIONS, help="slow: it runs half of the time; drill: random kills")
    parser.add_argument("rank", type=int, nargs="?", help="which rank; not for a drill")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to be slow, or to drill (default: 30)")
    parser.add_argument(
        "--share", type=float, default=0.5, help="slow: the share of the time that it runs (default: 0.5)"
    )
    parser.add_argument("--every", type=float, default=5.0, help="drill: mean seconds between kills (default: 5)")
    parser.add_argument("--most", type=int, default=1, help="drill: how many ranks at once at most (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="drill: the same seed chooses the same ranks (default: 0)")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> int:
    from eep.drill.faults import Target, allowed_in

    directory = Path(options.dir)
    if not allowed_in(directory):
        raise ValueError(f"the server of {directory} was not started with --eep-faults on; it is left alone")
    target = Target(directory)
    if options.action == "drill":
        for _, rank in target.drill(options.seconds, options.every, options.seed, most=options.most):
            print(f"killed rank {rank}", flush=True)
        return 0
    if options.rank is None:
        raise ValueError(f"eep fault {options.action} needs the number of a rank")
    match options.action:
        case "kill":
            target.kill(options.rank)
        case "stop":
            target.stop(options.rank)
        case "cont":
            target.resume(options.rank)
        case "slow":
            target.slow(options.rank, options.seconds, options.share)
    print(f"{options.action}: rank {options.rank}")
    return 0
