"""What the loss of a rank and of a whole host of two costs the clients of the other host.

Starts the real SGLang server on two hosts, which are network namespaces of this machine, with etcd and the clients on a
third. Clients stream from host 0, and every token is compared with the fault-free answer. A rank of host 1 is killed; then
all processes of host 1 at once, as by a power cut. Told are the times until the survivors agree, until they run, and until
the clients have their next token.

Writes host-loss-cpu.json and .md into --results. The exit code is 0 only if no request failed and no token was wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common import host_servers
from bench.common.arguments import add_files, make_parser
from bench.common.host_servers import RANKS_EACH, HostServers
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from eep.drill.load import Load
from eep.drill.models.checkpoint import make_model
from eep.drill.story import Fault, Story
from eep.drill.token_certainty import clear_prompts

HOSTS, PROMPTS, TOKENS = 2, 8, 48
_CALM = 3.0
"""Seconds of load before a fault, and after it."""
_NAMES = {"a rank": "a rank of host 1", "a host": "host 1, all its processes"}


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(
        "bench.host_loss",
        __doc__,
        "Needs root, for network namespaces, etcd and SGLang.\n\nexamples:\n  python -m bench.host_loss --losses 3",
    )
    parser.add_argument("--losses", type=int, default=3, help="how often each kind of loss is tried (default: 3)")
    parser.add_argument("--clients", type=int, default=4, help="how many stream at once (default: 4)")
    parser.add_argument("--host-timeout-s", type=float, default=1.5, help="as --eep-host-timeout-s (default: 1.5)")
    add_files(parser)
    arguments = parser.parse_args()
    if arguments.losses < 1 or arguments.clients < 1:
        parser.error("--losses and --clients must be at least 1")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if reason := host_servers.why_not():
        print(reason, file=sys.stderr)
        return 1
    head = provenance()
    with tempfile.TemporaryDirectory(prefix="eep-bench-") as place:
        model = make_model(Path(place) / "model")
        flags = ("--eep-host-timeout-s", str(arguments.host_timeout_s), "--incremental-streaming-output")
        with host_servers.running(model, Path(place), HOSTS, flags) as servers:
            rows, load = measure(servers, arguments)
    told = {"answered": len(load.answers), "failed": len(load.failed), "wrong": len(load.wrong)}
    page = describe(head, arguments, rows, told)
    print(page)
    if not arguments.no_files:
        write_results(arguments.results / "host-loss-cpu", {**head, "requests": told, "losses": rows}, page)
    return 1 if told["failed"] or told["wrong"] else 0


def measure(servers: HostServers, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], Load]:
    url = servers.servers[0].url
    prompts = clear_prompts(url, [[7 + n, 11, 13 + 2 * n, 17] for n in range(4 * PROMPTS)], PROMPTS, TOKENS)
    load = Load.with_reference(url, prompts, tokens=TOKENS, clients=arguments.clients)
    story = Story(servers.servers[0].directory or Path(), load)
    losses: list[tuple[str, Fault]] = []
    with load:
        for _ in range(arguments.losses):
            losses.append(("a rank", lose(story, "a rank", lambda: kill_rank(servers))))
            wait_for_all(story)
            losses.append(("a host", lose(story, "a host", servers.servers[1].kill)))
            servers.start_again(1)
            wait_for_all(story)
    story.close()
    # Only now, because an answer that is under way counts from its end on.
    return [row_of(what, fault, load) for what, fault in losses], load


def lose(story: Story, what: str, kill: Callable[[], None]) -> Fault:
    time.sleep(_CALM)
    fault = Fault(RANKS_EACH, f"lost with {what}", time.monotonic())
    story.faults.append(fault)
    kill()
    if not story.wait_until_noticed(fault):
        raise SystemExit(f"the survivors did not go on after the loss of {what}")
    time.sleep(_CALM)
    return fault


def row_of(what: str, fault: Fault, load: Load) -> dict[str, Any]:
    assert fault.noticed is not None
    assert fault.running is not None
    return {
        "lost": what,
        "agreed_ms": round(fault.noticed * 1e3),
        "running_ms": round(fault.running * 1e3),
        "gap_ms": round(load.largest_gap(fault.at, fault.at + _CALM) * 1e3),
    }


def kill_rank(servers: HostServers) -> None:
    from eep.drill.faults import Target

    Target(servers.servers[1].directory or Path()).kill(RANKS_EACH)


def wait_for_all(story: Story) -> None:
    if not story.wait_until_all_run(HOSTS * RANKS_EACH):
        raise SystemExit("the ranks that were lost did not come back")


def describe(
    head: dict[str, Any], arguments: argparse.Namespace, rows: list[dict[str, Any]], told: dict[str, int]
) -> str:
    machine = head["machine"]
    lines = [
        f"| {_NAMES[row['lost']]} | {row['agreed_ms']} ms | {row['running_ms']} ms | {row['gap_ms']} ms |"
        for row in rows
    ]
    return "\n".join(
        [
            "# Losing a rank and a host of two",
            "",
            f"`{head['command']}`, commit {head['commit']}, {head['date']}. {machine['cpu']}, {machine['cores']} cores for",
            f"two hosts of {RANKS_EACH} ranks in network namespaces, etcd and {arguments.clients} clients of host 0. Host",
            f"timeout {arguments.host_timeout_s:g} s.",
            "",
            f"{told['answered']} requests, {told['failed']} failed, {told['wrong']} with a wrong token.",
            "",
            "| lost | agreed after | survivors run after | largest gap between tokens of a client |",
            "|---|---:|---:|---:|",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
