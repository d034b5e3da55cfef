"""What the bench of long contexts can be told, and what of it makes no sense."""

from __future__ import annotations

import argparse
import math

from bench.common.arguments import add_files, make_parser
from bench.context.plan import COPIED, RANKS, WAYS, parse_contexts
from eep.drill.devices import DEVICES


def parse(description: str | None) -> argparse.Namespace:
    parser = make_parser(
        "bench.context",
        description,
        "examples:\n"
        "  python -m bench.context                                       about six minutes on two cores\n"
        "  python -m bench.context --context 512 --kills 2 --no-files    does it work? two minutes\n"
        "  python -m bench.context --context 128,512,2048,8192 --kills 48\n"
        "  python -m bench.context --device cuda --context 128,2048,8192 --kills 30\n"
        "  python -m bench.context --device cuda --context 128,2048,8192,32768,100000 --kills 30 --dtype bfloat16 "
        "--kv-backup 24GiB --seconds 400",
    )
    add = parser.add_argument
    add("--context", default="128,512,2048", metavar="N[,N...]", help="tokens of long prompts (default: 128,512,2048)")
    add("--kills", type=int, default=20, help="of all lengths and ways together (default: 20)")
    add("--device", choices=sorted(DEVICES), default="cpu", help="where the ranks run (default: cpu)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model (default: float32)")
    add("--long", type=int, default=8, help="clients with long prompts, at most (default: 8)")
    add("--short", type=int, default=4, help="clients with short prompts (default: 4)")
    add("--tokens", type=int, default=64, help="of a long answer; the kill comes after a quarter (default: 64)")
    add(
        "--kv-backup",
        default="",
        metavar="SIZE",
        help="copy contexts to host memory too, and restore from there in turns",
    )
    add(
        "--seconds",
        type=float,
        default=math.inf,
        help="begin no kill later than this after the start (default: no limit)",
    )
    add(
        "--restored",
        type=int,
        default=1,
        metavar="TIMES",
        help="restore so many times as often as each other way is taken (default: 1)",
    )
    add(
        "--spares",
        type=int,
        default=RANKS,
        help=f"on a GPU: how many to keep, a multiple of {RANKS} (default: {RANKS})",
    )
    add("--seed", type=int, default=1, help="decides prompts and the order of kills (default: 1)")
    add("--note", default="", help="a sentence about the machine, for the page: what else ran on it (default: none)")
    add_files(parser)
    options = parser.parse_args()
    try:
        options.contexts = parse_contexts(options.context)
    except ValueError as error:
        parser.error(f"--context {error}")
    options.ways = [way for way in WAYS if way != COPIED or options.kv_backup]
    cells = len(options.contexts) * len(options.ways)
    for name, least in {"kills": cells, "long": 1, "short": 0, "tokens": 8}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least} here, got {getattr(options, name)}")
    if options.restored < 1:
        parser.error(f"--restored must be at least 1, got {options.restored}")
    if options.spares < RANKS or options.spares % RANKS:
        parser.error(f"--spares must be a multiple of {RANKS}, got {options.spares}")
    return options
