"""``eep fault``: faults on purpose in a server that runs, from the command line. (``eep drill`` is in ``drill_command``.)"""

from __future__ import annotations

import argparse
from typing import Any

from eep.console.rank_argument import rank_number
from eep.console.server_choice import directory_of
from eep.drill import drill_command

ACTIONS = ("kill", "stop", "cont", "slow", "drop", "drill", "arm", "disarm")


def register(commands: Any) -> argparse.ArgumentParser:
    """Adds the commands of drills; the ``--dir`` of the one that is returned is added with that of the others."""
    drill_command.register(commands)
    parser: argparse.ArgumentParser = commands.add_parser(
        "fault",
        help="kill, stop, wake or slow down a rank of a running server, or kill at random",
        description="Faults on purpose. The server must have been started with --eep-faults on, and the caller must be "
        "able to read the key in its private directory.",
    )
    parser.add_argument(
        "action",
        choices=ACTIONS,
        help="slow: it runs half of the time; drop: what it sends is lost; drill: random kills; arm: at a named point",
    )
    parser.add_argument("number", type=rank_number, nargs="?", metavar="RANK", help="which rank; not for a drill")
    parser.add_argument("--rank", type=rank_number, help="the same")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to be slow, or to drill (default: 30)")
    parser.add_argument(
        "--share", type=float, default=0.5, help="slow: the share of the time that it runs (default: 0.5)"
    )
    parser.add_argument("--count", type=int, default=1, help="drop: how many messages in a row are lost (default: 1)")
    parser.add_argument("--every", type=float, default=5.0, help="drill: mean seconds between kills (default: 5)")
    parser.add_argument("--most", type=int, default=1, help="drill: how many ranks at once at most (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="drill: the same seed chooses the same ranks (default: 0)")
    parser.add_argument("--point", help="arm: where; docs/reference.md lists the points")
    parser.add_argument(
        "--action", dest="what", default="kill", help="arm: kill, stop, sleep, spin or drop (default: kill)"
    )
    parser.add_argument("--skip", type=int, default=0, help="arm: how many passings to let go by (default: 0)")
    parser.add_argument(
        "--sleep-ms", type=float, default=1000.0, help="arm: how long it sleeps or spins (default: 1000)"
    )
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> int:
    from eep.drill.faults import Target

    target = Target(directory_of(options))
    target.need_permission()
    rank = options.number if options.rank is None else options.rank
    match options.action:
        case "drill":
            for _, killed in target.drill(options.seconds, options.every, options.seed, most=options.most):
                print(f"killed rank {killed}", flush=True)
        case "disarm":
            print(f"disarm: {target.disarm()} points had not acted")
        case "arm":
            _arm(target, rank, options)
        case _ if rank is None:
            raise ValueError(f"eep fault {options.action} needs the number of a rank")
        case _:
            _do(target, rank, options)
            print(f"{options.action}: rank {rank}")
    return 0


def _do(target: Any, rank: int, options: argparse.Namespace) -> None:
    match options.action:
        case "kill":
            target.kill(rank)
        case "stop":
            target.stop(rank)
        case "cont":
            target.resume(rank)
        case "slow":
            target.slow(rank, options.seconds, options.share)
        case "drop":
            target.drop(rank, options.count)


def _arm(target: Any, rank: int | None, options: argparse.Namespace) -> None:
    if options.point is None:
        raise ValueError("eep fault arm needs --point; docs/reference.md lists the points")
    sleep_ms = options.sleep_ms if options.what in ("sleep", "spin") else 0
    target.arm(rank, options.point, options.what, skip=options.skip, sleep_ms=sleep_ms, count=options.count)
    print(f"arm: {'the supervisor' if rank is None else f'rank {rank}'} is to {options.what} at {options.point}")
