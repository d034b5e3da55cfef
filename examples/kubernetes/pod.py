"""One pod with one rank: a supervisor, and the process that it starts, watches and starts again.

    pod.py --rank 2 --ranks 4 --address 10.0.0.3 --store http://etcd:2379 --job demo --key-file /etc/eep/key
    pod.py --probe        whether the rank of this pod takes part; for a readiness probe

Pods share no directory and pass no descriptors: ranks exchange tokens over the network even on one node, supervisors agree
through etcd, and their links tell them at once who is lost. The rank (pod_rank.py) exchanges tokens step by step and compares
every result with its exact value. It says so on standard output; a wrong value ends the pod with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from eep.access import NotPrivate
from eep.control.store.etcd_store import EtcdStore
from eep.control.store.record_seal import RecordSeal
from eep.control.supervisor.settings import DirectorySettings, LaunchSettings, LinkSettings, StoreSettings
from eep.control.supervisor.supervisor import Supervisor
from eep.control.wire.client import ask_supervisor
from eep.control.wire.messages import AskStatus
from eep.membership import Policy

DIRECTORY = Path("/run/eep")
"""Of this pod alone."""
RANK_PROGRAM = Path(__file__).with_name("pod_rank.py")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, help="of this pod, from 0 on")
    parser.add_argument("--ranks", type=int, help="how many pods there are at most")
    parser.add_argument("--address", help="of this pod, in numbers, at which the others reach it")
    parser.add_argument("--store", help="the endpoints of etcd, with commas between them")
    parser.add_argument("--job", help="a name that all pods of this job share, and no others")
    parser.add_argument("--key-file", type=Path, help="32 bytes, the same for all pods")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help=f"of this pod alone (default: {DIRECTORY})")
    parser.add_argument(
        "--host-timeout", type=float, default=1.5, help="after how many seconds of silence a pod is lost"
    )
    parser.add_argument("--probe", action="store_true", help="ask the supervisor of this pod, and end")
    arguments = parser.parse_args()
    needed = ("rank", "ranks", "address", "store", "job", "key_file")
    if not arguments.probe and (missing := [name for name in needed if getattr(arguments, name) is None]):
        parser.error(f"give --{missing[0].replace('_', '-')}")
    return arguments


def make_supervisor(arguments: argparse.Namespace) -> Supervisor:
    key = arguments.key_file.read_bytes()
    endpoints = tuple(arguments.store.split(","))
    return Supervisor(
        [sys.executable, str(RANK_PROGRAM)],
        [arguments.rank],
        # A rank that keeps dying is started again for ever: that is what a pod is for.
        Policy(max_ranks=arguments.ranks, relaunch_limit=10**6, longest_backoff=10.0),
        host=f"pod-{arguments.rank}",
        launch=LaunchSettings(
            environment={
                "POD_RANKS": str(arguments.ranks),
                "POD_ADDRESS": arguments.address,
                "POD_STORE": arguments.store,
                "POD_JOB": arguments.job,
            }
        ),
        directory=DirectorySettings(arguments.directory, key=key),
        store=StoreSettings(EtcdStore(endpoints, arguments.job, seal=RecordSeal(key), answer_within=1.0)),
        links=LinkSettings(arguments.address, key, host_timeout_s=arguments.host_timeout),
    )


def probe(directory: Path) -> int:
    """0 if the rank of this pod is in, and steps run."""
    try:
        status = json.loads(ask_supervisor(directory, AskStatus()).body)
    except (OSError, NotPrivate) as error:
        print(f"the supervisor of this pod does not answer: {error}", file=sys.stderr)
        return 1
    takes_part = status["phase"] == "RUN" and all(rank["in"] for rank in status["ranks"].values())
    print(f"{status['phase']} with ranks {status['active']}, waiting for {status['waiting_for']}")
    return 0 if takes_part else 1


def main() -> int:
    arguments = parse_arguments()
    if arguments.probe:
        return probe(arguments.directory)
    asyncio.run(run(arguments))
    return 0


async def run(arguments: argparse.Namespace) -> None:
    supervisor = make_supervisor(arguments)
    print(f"pod {arguments.rank}: {supervisor.ident}, process {os.getpid()}", flush=True)
    await supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
