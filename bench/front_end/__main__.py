"""Measures what a request costs the front end while 10, 1,000 and 10,000 others are open.

The front end is the real one. SGLang and the ranks are stood in for: what is sent goes to a list. One more request is
accepted, gets a token and is aborted, and each of the three is timed; then the next. The sizes take turns, so that a busy
machine slows all of them alike: compare the sizes of one run. "waiting": no rank is in, and all requests wait.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable
from typing import Any

from bench.common.arguments import add_files, add_quick, make_parser
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from tests.sglang_patches.front_end.front_end_server import AbortReq, Server, TokenizedGenerateReqInput

RANKS = {"r0": 0, "r1": 0, "r2": 0, "r3": 0}
LONG_PROMPT = 32768
Samples = dict[str, list[float]]


class FullServer:
    """A front end with ``count`` open requests, to which one is added at a time."""

    def __init__(self, count: int, has_ranks: bool) -> None:
        self.server, self._has_ranks = Server(), has_ranks
        if has_ranks:
            self.server.view(1, **RANKS)
        start = time.perf_counter()
        for number in range(count):
            self.server.accept(f"{number:032x}")
        self.seconds_to_fill = time.perf_counter() - start
        self._next = count

    def serve_one(self) -> dict[str, float]:
        """The seconds that each part of one request takes."""
        name, server = f"{self._next:032x}", self.server
        self._next += 1
        message = TokenizedGenerateReqInput(name)
        taken = {"accept": _seconds(lambda: server.front_end.send(message))}
        if self._has_ranks:
            taken["token"] = _seconds(lambda: server.deliver(name, [1], "a", 1))
        taken["abort"] = _seconds(lambda: server.front_end.send(AbortReq(name)))
        if self._has_ranks:
            server.front_end.abort_answer(AbortReq(name))
        server.sent.clear()
        server.answered.clear()
        return taken


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(sizes: list[int], has_ranks: bool, rounds: int, each: int) -> dict[str, dict[str, float]]:
    """For each size: the median microseconds of each part of a request, and the seconds that it took to accept them all."""
    servers = {size: FullServer(size, has_ranks) for size in sizes}
    samples: dict[int, Samples] = {size: {} for size in sizes}
    for _ in range(rounds):
        for size, server in servers.items():
            for _ in range(each):
                for part, seconds in server.serve_one().items():
                    samples[size].setdefault(part, []).append(seconds)
    return {
        str(size): {
            **{f"{part}_us": round(statistics.median(taken) * 1e6, 2) for part, taken in samples[size].items()},
            "fill_s": round(servers[size].seconds_to_fill, 4),
        }
        for size in sizes
    }


def bytes_held_for_a_long_prompt() -> int:
    """What the front end holds for one request beyond the message that it was sent."""
    server = Server()
    server.view(1, **RANKS)
    message = TokenizedGenerateReqInput("long", array("q", range(1000, 1000 + LONG_PROMPT)))
    tracemalloc.start()
    try:
        server.front_end.send(message)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return held


def table(results: dict[str, Any]) -> str:
    lines = ["| median microseconds | " + " | ".join(f"{size} open" for size in results["sizes"]) + " | ratio |"]
    lines.append("|---|" + "---:|" * (len(results["sizes"]) + 1))
    for state in ("serving", "waiting"):
        measured = list(results[state].values())
        for part in (name for name in measured[0] if name.endswith("_us")):
            values = [costs[part] for costs in measured]
            cells = " | ".join(f"{value:.1f}" for value in values)
            lines.append(f"| {state}: {part.removesuffix('_us')} | {cells} | {values[-1] / values[0]:.2f} |")
        cells = " | ".join(f"{costs['fill_s']:.3f} s" for costs in measured)
        lines.append(f"| {state}: accept all of them | {cells} | |")
    return "\n".join(lines)


def page(results: dict[str, Any]) -> str:
    machine = results["machine"]
    return (
        "# What a request costs the front end\n\n"
        f"`{results['command']}` at {results['commit']}, {results['date']}.\n"
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, load average {machine['load_average']}.\n\n"
        "The front end of the plugin alone: SGLang and the ranks are stood in for. *serving*: four ranks are in.\n"
        "*waiting*: no rank is in. *ratio*: the most open requests against the fewest, in the same run. The sizes\n"
        "took turns, so other work on the machine slowed all of them.\n\n"
        f"{table(results)}\n\n"
        f"For a request with a prompt of {LONG_PROMPT} tokens the front end holds {results['long_prompt_bytes']} bytes\n"
        "beyond the message that SGLang sent it.\n"
    )


def main() -> None:
    parser = make_parser(
        "bench.front_end",
        __doc__,
        "Files: front_end.json, front_end.md.\n\n"
        "examples:\n"
        "  python -m bench.front_end             everything, about half a minute\n"
        "  python -m bench.front_end --quick     does it work? a second",
    )
    parser.add_argument(
        "--open", type=int, nargs="+", default=[10, 1000, 10000], help="open requests (default: 10 1000 10000)"
    )
    parser.add_argument("--rounds", type=int, default=50, help="turns of each size (default: 50)")
    parser.add_argument("--each", type=int, default=40, help="requests of a size in each turn (default: 40)")
    add_quick(parser)
    add_files(parser)
    options = parser.parse_args()
    if options.quick:
        options.open, options.rounds, options.each, options.no_files = [10, 100], 2, 5, True
    results: dict[str, Any] = {
        **provenance(),
        "sizes": options.open,
        "serving": measure(options.open, True, options.rounds, options.each),
        "waiting": measure(options.open, False, options.rounds, options.each),
        "long_prompt_bytes": bytes_held_for_a_long_prompt(),
    }
    print(table(results))
    print(f"a prompt of {LONG_PROMPT} tokens: {results['long_prompt_bytes']} bytes beyond the message")
    if not options.no_files:
        write_results(options.results / "front_end", results, page(results))


if __name__ == "__main__":
    main()
