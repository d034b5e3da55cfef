"""Measures how soon the loss of a rank or of a host is known on the other hosts, and how soon the next view is.

Three hosts with two small ranks each, and a node of etcd on a fourth, are network namespaces of this machine. Ranks and hosts
are killed with SIGKILL, and hosts are cut off both ways. All times are of one clock, from the kill to the slowest survivor.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.common import network_namespaces
from bench.common.arguments import add_files, add_quick, make_parser
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from bench.detection.host_program import MOMENTS
from bench.detection.report import CASES, Samples, markdown, row
from tests.control.links.separate_hosts import SeparateHosts

HOSTS = 3
STORE = HOSTS
PROGRAM = "bench.detection.host_program"


class Detection:
    """Three hosts that are hurt and heal, again and again."""

    def __init__(self, hosts: SeparateHosts) -> None:
        self._hosts = hosts
        self._all = tuple(range(HOSTS))

    def form(self) -> None:
        self._hosts.until("forming", lambda: self._hosts.run_with(*self._all, linked=False))
        time.sleep(0.5)  # links, and the watches of the store, are up again after the last harm

    def lose(self, victim: int, harm: Callable[[], None], mend: Callable[[], None]) -> dict[str, float]:
        """The milliseconds from the harm to what the slowest of the other hosts knew."""
        epoch = self._hosts.status(0)["epoch"]
        survivors = [host for host in self._all if host != victim]
        began = time.monotonic_ns()
        harm()
        self._hosts.until("the next view", lambda: all(self._hosts.status(host)["epoch"] > epoch for host in survivors))
        seen = [self._seen(host, epoch) for host in survivors]
        mend()
        return {
            "known": max(min(each) for each in seen) / 1e6 - began / 1e6,
            "view": max(each[1] for each in seen) / 1e6 - began / 1e6,
        }

    def _seen(self, host: int, epoch: int) -> tuple[int, int]:
        """When a host revoked the epoch, and when it saw the next view."""
        lines = [json.loads(line) for line in (self._hosts.private(host) / MOMENTS).read_text().splitlines()]
        view = next(at for what, number, at in lines if what == "view" and number == epoch + 1)
        return next((at for what, number, at in lines if what == "revoke" and number == epoch), view), view

    def lose_rank(self, turn: int) -> dict[str, float]:
        victim = turn % HOSTS
        self.form()
        pid = self._hosts.pid(victim, self._hosts.ranks(victim)[turn % 2])
        return self.lose(victim, lambda: os.kill(pid, signal.SIGKILL), lambda: None)

    def lose_host(self, turn: int) -> dict[str, float]:
        victim = turn % HOSTS
        self.form()
        return self.lose(victim, lambda: self._hosts.kill(victim), lambda: self._hosts.start(victim))

    def cut_host(self, turn: int) -> dict[str, float]:
        victim, network = turn % HOSTS, self._hosts.network
        self.form()
        return self.lose(victim, lambda: network.isolate(victim, both_ways=True), network.heal)


def measure(timeout: float, times: dict[str, int]) -> Samples:
    """``timeout`` 0: without links. ``times`` says how often each case is tried."""
    samples: Samples = {}
    with tempfile.TemporaryDirectory() as directory:
        hosts = SeparateHosts(Path(directory), HOSTS, [STORE], timeout, PROGRAM)
        try:
            detection = Detection(hosts)
            cases = {"rank": detection.lose_rank, "host": detection.lose_host, "cut": detection.cut_host}
            for case, count in times.items():
                for turn in range(count):
                    samples.setdefault(case, []).append(cases[case](turn))
                    print(f"{CASES[case]}: {turn + 1} of {count}", end="\r", file=sys.stderr)
        finally:
            hosts.close()
    return samples


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(
        "bench.detection",
        __doc__,
        "Hosts, ranks and etcd share the cores of one machine. Needs root, for network namespaces, and etcd.\n"
        "Files: detection-cpu.json and detection-cpu.md.\n\n"
        "examples:\n"
        "  python -m bench.detection             everything, about five minutes\n"
        "  python -m bench.detection --quick     does it work? less than a minute",
    )
    parser.add_argument("--ranks", type=int, default=30, help="how many ranks are killed, with links and without (30)")
    parser.add_argument("--hosts", type=int, default=9, help="how many hosts are killed, and how many are cut off (9)")
    parser.add_argument("--host-timeout", type=float, default=1.5, help="in seconds (1.5)")
    add_quick(parser)
    add_files(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ranks, arguments.hosts, arguments.no_files = 2, 1, True
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if reason := network_namespaces.why_not():
        print(reason, file=sys.stderr)
        return 1
    head = provenance()
    linked = measure(arguments.host_timeout, {"rank": arguments.ranks, "host": arguments.hosts, "cut": arguments.hosts})
    alone = measure(0.0, {"rank": arguments.ranks})
    for name, samples in (("links", linked), ("no links", alone)):
        for case, values in samples.items():
            print(row(name, case, values))
    if not arguments.no_files:
        told = {**head, "host_timeout_s": arguments.host_timeout, "links": linked, "no links": alone}
        text = markdown(head, arguments.host_timeout, linked, alone)
        write_results(arguments.results / "detection-cpu", told, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
