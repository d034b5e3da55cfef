"""``eep``: what an operator types.

    eep events --dir DIR [--follow] [--json]     print the event log, one line per transition
    eep status --dir DIR                         print the state of this host and what it waits for, as JSON
    eep rank remove|launch|kill RANK --dir DIR   ask for a change; safe to repeat with the same --operation
    eep fault kill|stop|cont|slow|drop RANK ...  cause a fault in a rank of a running server
    eep fault arm RANK --point P --action A ...  the same when the rank passes a named point; disarm undoes it
    eep fault drill --dir DIR [--seconds S]      kill ranks at random
    eep backup serve ...                         keep experts in this host's memory, for repair
    eep anchor serve|status|release --dir D      hold the weights of servers that come and go
    eep make-model PATH [--family F] [--size S] [--fp8]
                                                 write a random MoE model, to try a server with

``DIR`` is the supervisor's private directory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from eep.anchor.command import register as register_anchor
from eep.drill.command import register as register_faults
from eep.experts.backup.command import register as register_backup
from eep.observe.event_log import parse_line, read_lines

LOOKS_EVERY = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except BrokenPipeError:
        return 0  # the reader of the output has seen enough
    except FileNotFoundError as error:
        print(
            f"eep: there is no {error.filename}; --dir must name the directory of a running supervisor", file=sys.stderr
        )
        return 1
    except (OSError, ValueError) as error:
        print(f"eep: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eep", description="Elastic expert parallelism, for operators.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    events = commands.add_parser("events", help="print the event log of a supervisor")
    events.add_argument("--follow", action="store_true", help="keep printing new lines until the log is removed")
    events.add_argument("--json", action="store_true", help="print the lines as JSON, as they are in the log")
    events.set_defaults(run=_events)
    status = commands.add_parser("status", help="print the state of a supervisor's host and what it waits for, as JSON")
    status.set_defaults(run=_status)
    rank = commands.add_parser("rank", help="take a rank out, bring it back, or kill it")
    rank.add_argument("action", choices=("remove", "launch", "kill"))
    rank.add_argument("rank", type=int)
    rank.add_argument("--operation", default="", help="name of the request; repeating a name does nothing twice")
    rank.set_defaults(run=_rank)
    fault = register_faults(commands)
    for command in (events, status, rank, fault):
        command.add_argument(
            "--dir",
            type=Path,
            default=os.environ.get("EEP_CONTROL_DIR"),
            required="EEP_CONTROL_DIR" not in os.environ,
            help="the supervisor's private directory (default: $EEP_CONTROL_DIR)",
        )
    register_backup(commands)
    register_anchor(commands)
    model = commands.add_parser("make-model", help="write a random MoE checkpoint with its tokenizer")
    model.add_argument("path", type=Path, help="a directory that does not exist yet, or is empty")
    model.add_argument(
        "--family",
        choices=("qwen3", "deepseek-v3", "glm4-moe", "gpt-oss"),
        default="qwen3",
        help="the kind of model: its attention, its gate, and what it has beside experts (default: qwen3)",
    )
    model.add_argument("--seed", type=int, default=0, help="the same seed gives the same weights (default: 0)")
    model.add_argument(
        "--size",
        choices=("tiny", "small", "large"),
        default="tiny",
        help="tiny: 15 MB, for a CPU; small: hidden 1024, 140 MB, for drills on a GPU; large: 8 layers, hidden 2048, 32 "
        "experts, 2.6 GB, for measuring on one (default: tiny)",
    )
    model.add_argument("--fp8", action="store_true", help="experts in fp8, a scale for each 128 x 128 weights")
    model.set_defaults(run=_make_model)
    return parser


def _events(options: argparse.Namespace) -> int:
    wait = partial(time.sleep, LOOKS_EVERY) if options.follow else None
    for line in read_lines(Path(options.dir) / "events.jsonl", wait):
        print(line.rstrip() if options.json else parse_line(line), flush=True)
    return 0


def _status(options: argparse.Namespace) -> int:
    from eep.anchor.anchor import AnchorGone, list_held
    from eep.control.private_directory import PrivateDirectory
    from eep.control.wire.client import ask_supervisor
    from eep.control.wire.messages import AskStatus
    from eep.experts.balancing.balance_record import read_balance
    from eep.experts.margin_record import read_margin

    status = json.loads(ask_supervisor(Path(options.dir), AskStatus()).body)
    try:
        status["anchored"] = [asdict(held) for held in list_held(Path(options.dir))]
    except AnchorGone:
        status["anchored"] = None
    experts = PrivateDirectory(Path(options.dir)).experts
    status["margin"] = read_margin(experts, status["epoch"])
    status["balance"] = read_balance(experts, status["epoch"])
    print(json.dumps(status, indent=2))
    return 0


def _rank(options: argparse.Namespace) -> int:
    from eep.control.wire.client import ask_supervisor
    from eep.control.wire.messages import AskOperation

    operation = options.operation or uuid.uuid4().hex
    answer = ask_supervisor(Path(options.dir), AskOperation(operation, options.action, options.rank))
    if not answer.ok:
        raise ValueError(answer.body)
    print(f"asked to {options.action} rank {options.rank}; operation {operation}")
    return 0


def _make_model(options: argparse.Namespace) -> int:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ValueError("making a model needs the transformers package: pip install transformers") from None
    from eep.drill.models.checkpoint import make_model

    made = make_model(options.path, options.seed, options.size, family=options.family, fp8=options.fp8)
    print(f"wrote {made}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
