"""``eep backup serve``: run the backup service of this host in the foreground until it is told to end."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from eep.byte_size import parse_size

if TYPE_CHECKING:
    import torch

    from eep.experts.registry.directory_registry import Registry


_MOST_KEY_BYTES = 4096


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``backup`` to the commands of ``eep``. What it needs is imported when it runs."""
    backup = commands.add_parser("backup", help="keep experts in host memory, for repair")
    actions = backup.add_subparsers(required=True, metavar="serve")
    parser = actions.add_parser("serve", help="serve this host's share until SIGTERM or SIGINT")
    parser.add_argument(
        "--registry",
        required=True,
        help="where ranks and services meet: a private directory (one host), or the address of an etcd such as "
        "http://10.0.0.1:2379 (several, with commas between the addresses of its nodes)",
    )
    parser.add_argument("--job", default="job", help="keeps the keys of one job apart from others in etcd")
    parser.add_argument(
        "--key-file",
        help="a file with the key of the job, 32 bytes that no other user can read: records in etcd are sealed with it "
        "(default: none, and what any client of etcd writes is believed)",
    )
    parser.add_argument("--name", required=True, help="name of this service, different on every host")
    parser.add_argument("--memory", required=True, type=_size, help="most memory to use, as in 170GiB")
    parser.add_argument("--host", type=int, default=0, help="number of this host in the topology (default 0)")
    parser.add_argument("--replicas", type=int, default=1, help="copies of each expert, on different hosts")
    parser.add_argument("--expect", type=int, default=1, help="services to wait for before sharing out")
    parser.add_argument("--address", default="127.0.0.1", help="address of the interface that peers reach")
    parser.add_argument("--protocol", choices=["tcp", "rdma"], default="tcp")
    parser.add_argument("--checkpoint", help="fill from this checkpoint, not from the live parameters")
    parser.add_argument("--family", help="model family of the checkpoint (default: seen from its names)")
    parser.add_argument("--layers", type=_layers, help="layers of the checkpoint to keep, as in 3,4,5 (default: all)")
    parser.add_argument(
        "--dtypes", help="types that an expert's tensors are served as, as in float32,float32 (default: as stored)"
    )
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from eep.errors import EepError
    from eep.experts.backup.service import BackupOptions, BackupService, serve_backup
    from eep.experts.backup.transfer_engine import Engine

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        options = BackupOptions(
            arguments.name,
            arguments.host,
            arguments.memory,
            arguments.replicas,
            arguments.expect,
            arguments.checkpoint,
            arguments.family,
            arguments.layers,
            _dtypes(arguments.dtypes),
        )
        registry = _registry(arguments.registry, arguments.job, arguments.key_file)
        engine = Engine(arguments.address, arguments.protocol)
        serve_backup(BackupService(registry, engine, options, _say, _progress), stop)
    except (EepError, ValueError, OSError) as error:
        print(f"eep backup: {error}", file=sys.stderr)
        return 1
    return 0


def _registry(where: str, job: str, key_file: str | None) -> Registry:
    from eep.experts.registry.directory_registry import DirectoryRegistry
    from eep.experts.registry.store_registry import StoreRegistry

    if not where.startswith(("http://", "https://")):
        return DirectoryRegistry(where)
    etcd = importlib.import_module("eep.control.store.etcd_store")
    seal = None
    if key_file is not None:
        seal = importlib.import_module("eep.control.store.record_seal").RecordSeal(_key(key_file))
    return StoreRegistry(lambda: etcd.EtcdStore(tuple(where.split(",")), job, seal=seal))


def _key(path: str) -> bytes:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise ValueError(f"{path} holds the key of the job, and other users can read it; chmod 600 {path}")
        return file.read(_MOST_KEY_BYTES)


def _say(line: str) -> None:
    print(line, flush=True)


def _progress(experts: list[int]) -> Iterable[int]:
    """A progress bar where there is a terminal to draw it on."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import track
        except ImportError:
            return experts
        return track(experts, description="copying experts", console=Console(stderr=True))
    return experts


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _layers(text: str) -> tuple[int, ...]:
    if re.fullmatch(r"\d+(,\d+)*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers; write it as in 3,4,5")
    return tuple(map(int, text.split(",")))


def _dtypes(text: str | None) -> tuple[torch.dtype, ...] | None:
    import torch

    if text is None:
        return None
    named = [getattr(torch, name, None) for name in text.split(",")]
    found = tuple(each for each in named if isinstance(each, torch.dtype))
    if len(found) < len(named):
        raise ValueError(f"{text!r} is not a list of types; write it as in float32,float32")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="eep")
    register(parser.add_subparsers(required=True))
    parsed = parser.parse_args(arguments)
    return int(parsed.run(parsed))


if __name__ == "__main__":
    sys.exit(main())
