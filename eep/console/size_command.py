"""``eep size``: how much memory ranks take for the exchange of tokens, before a server is started."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

_HEADS = ("tokens", "ranks", "at once", "portions", "region", "beside", "mirrors")


def register_size(commands: Any) -> None:
    command = commands.add_parser("size", help="say how much memory of each rank the exchange of tokens takes")
    command.add_argument("--hidden", type=int, required=True, help="the hidden size of the model")
    command.add_argument("--topk", type=int, required=True, help="how many experts a token goes to")
    command.add_argument("--ranks", default="8,64,256", help="how many ranks there may be (default: 8,64,256)")
    command.add_argument("--tokens", default="128,4096", help="of a rank in a step (default: 128,4096)")
    command.add_argument("--portion-tokens", type=int, help="as --eep-portion-tokens of the server")
    command.add_argument(
        "--wire", default="bf16", help="the type in which tokens cross: f32, bf16 or fp8 (default: bf16)"
    )
    command.add_argument("--layout", default="rank", help="rank; or expert, for decode with DeepGEMM (default: rank)")
    command.add_argument("--slots", type=int, default=1, help="experts of a rank; for --layout expert (default: 1)")
    command.set_defaults(run=_print_sizes)


def _print_sizes(options: argparse.Namespace) -> int:
    # Importing torch takes longer than all other commands.
    from eep.abi.peer_table import MAX_CUDA_RANKS, MAX_RANKS
    from eep.data_plane.buffer_shape import BufferShape
    from eep.data_plane.passage import count_portions
    from eep.data_plane.region_size import choose_room, mirror_bytes, packed_bytes, region_bytes

    def shape_of(ranks: int, tokens: int) -> BufferShape:
        return BufferShape(
            max_ranks=ranks,
            max_tokens=tokens,
            hidden=options.hidden,
            topk=options.topk,
            local_experts=options.slots,
            layout=options.layout,
            wire=options.wire,
        )

    def region_of(ranks: int, tokens: int) -> int:
        return region_bytes(shape_of(ranks, tokens))

    if options.portion_tokens is not None and options.portion_tokens < 1:
        raise ValueError(f"--portion-tokens must be positive, got {options.portion_tokens}")
    rows: list[Sequence[str]] = [_HEADS]
    for tokens in _numbers("--tokens", options.tokens):
        for ranks in _numbers("--ranks", options.ranks):
            room = choose_room(tokens, options.portion_tokens, partial(region_of, ranks))
            shape, portions = shape_of(ranks, room), count_portions([tokens], room)
            sizes = (region_bytes(shape), packed_bytes(shape), (ranks - 1) * mirror_bytes(shape))
            rows.append((*map(str, (tokens, ranks, room, portions)), *map(_written, sizes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(
        "Each rank takes its region and what lies beside it; and mirrors, if all other ranks are on other hosts. "
        f"There may be {MAX_RANKS} ranks on CPUs, and {MAX_CUDA_RANKS} on GPUs."
    )
    return 0


def _numbers(flag: str, text: str) -> list[int]:
    found = [int(each) for each in text.split(",") if each.isascii() and each.isdigit()]
    if len(found) != text.count(",") + 1 or min(found) < 1:
        raise ValueError(f"{flag} {text}: give positive numbers with commas between them")
    return found


def _written(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
