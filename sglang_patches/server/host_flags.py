"""``--nnodes``, ``--node-rank`` and what goes with them: this server is one host of an instance that has several.

SGLang is told of one host. Each host has a server of its own, with its ranks, its supervisor and its front end; the ranks of
all hosts exchange tokens. So no host is special, and each serves on when any other is lost.
"""

from __future__ import annotations

import argparse
import re
import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

from eep.abi import native
from eep.abi.link import NativeTransport
from eep.control.wire.sealed_frames import KEY_BYTES
from eep.errors import EepError
from sglang_patches import store_access
from sglang_patches.options import HostOptions

_NEEDED = ("eep_instance", "eep_address", "eep_key_file", "eep_store")
_MEANS_HOSTS = ("eep_instance", "eep_address", "eep_key_file", "eep_provider", "eep_host_timeout_s")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def add_host_flags(add: Callable[..., Any]) -> None:
    """``add`` is ``add_argument`` of a parser. ``--nnodes`` and ``--node-rank`` are SGLang's."""
    add(
        "--eep-instance",
        metavar="NAME",
        default=None,
        help="With --nnodes: the name by which the hosts of one instance find each other in --eep-store, the same on all.",
    )
    add(
        "--eep-address",
        metavar="IP",
        default=None,
        help="With --nnodes: the address of this host at which the others reach it. Links listen there, and at no other.",
    )
    add(
        "--eep-key-file",
        metavar="FILE",
        default=None,
        help="With --nnodes: the file with the key of the instance, 32 bytes, the same on all hosts. Make it with 'head -c "
        "32 /dev/urandom'. No other user may be able to read it.",
    )
    add(
        "--eep-provider",
        metavar="NAME",
        default=None,
        help="With --nnodes: the provider of libfabric over which tokens cross hosts: tcp, verbs, efa (default: tcp).",
    )
    add(
        "--eep-host-timeout-s",
        type=float,
        metavar="S",
        default=None,
        help="With --nnodes: how long another host may be silent before the others go on without it (default: 1.5).",
    )


def parse_host(arguments: argparse.Namespace, max_ranks: int, device: str) -> HostOptions | None:
    """What the flags say of this host; None if it has all ranks. SystemExit if they do not go together, or this machine lacks
    what they ask for."""
    hosts, number = getattr(arguments, "nnodes", 1) or 1, getattr(arguments, "node_rank", 0) or 0
    given = [name for name in _MEANS_HOSTS if getattr(arguments, name) is not None]
    if hosts == 1 and not given:
        return None
    if missing := [name for name in _NEEDED if getattr(arguments, name) is None]:
        because = f"--nnodes {hosts}" if hosts > 1 else ", ".join(map(_flag, given))
        raise SystemExit(
            f"{because} needs {', '.join(map(_flag, missing))} too: the hosts of an instance find each other in etcd, under "
            "a name, and know each other by a key; add what is missing"
        )
    _refuse_combinations(arguments, device)
    each = _ranks_each(arguments.tp_size, hosts, number, max_ranks)
    timeout = 1.5 if arguments.eep_host_timeout_s is None else arguments.eep_host_timeout_s
    if not 0.5 <= timeout <= 3600:
        raise SystemExit(f"--eep-host-timeout-s {timeout:g}: give a number of seconds from 0.5 to 3600")
    if _NAME.fullmatch(arguments.eep_instance) is None:
        raise SystemExit(
            f"--eep-instance {arguments.eep_instance!r} is no name: use up to 64 letters, digits, dots, dashes, underscores"
        )
    read_key(arguments.eep_key_file)
    provider = arguments.eep_provider or "tcp"
    _check_links(provider, arguments.eep_address)
    return HostOptions(
        number=number,
        ranks_each=each,
        instance=arguments.eep_instance,
        address=arguments.eep_address,
        key_file=arguments.eep_key_file,
        provider=provider,
        timeout_s=timeout,
    )


def read_key(file: str) -> bytes:
    """SystemExit if the file does not hold a key that is kept from other users."""
    try:
        key = store_access.read_secret("--eep-key-file", file)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if len(key) != KEY_BYTES:
        raise SystemExit(
            f"--eep-key-file {file} has {len(key)} bytes where {KEY_BYTES} are due; make it with 'head -c {KEY_BYTES} "
            "/dev/urandom', and give all hosts the same"
        )
    return key


def _ranks_each(ranks: int, hosts: int, number: int, max_ranks: int) -> int:
    """How many ranks a host has."""
    if hosts < 1 or ranks % hosts:
        raise SystemExit(f"--tp-size {ranks} cannot be shared evenly by --nnodes {hosts}; give each host as many ranks")
    each = ranks // hosts
    if max_ranks % each:
        raise SystemExit(
            f"--eep-max-ranks {max_ranks} is no multiple of the {each} ranks of a host: hosts are added whole; give "
            f"{max_ranks - max_ranks % each + each}"
        )
    if not 0 <= number < max_ranks // each:
        raise SystemExit(
            f"--node-rank {number} is not from 0 to {max_ranks // each - 1}: there are {each} ranks on a host, and at most "
            f"{max_ranks} in all; for another host give all hosts a larger --eep-max-ranks from the start"
        )
    return each


def _refuse_combinations(arguments: argparse.Namespace, device: str) -> None:
    for is_wrong, why in (
        (
            getattr(arguments, "enable_eplb", False),
            "it does not go together with --enable-eplb: experts do not move between hosts while they serve; leave out one",
        ),
        (
            (arguments.eep_backup or "off") != "off",
            "it does not go together with --eep-backup: each host would keep a backup that the others do not know; the "
            "second copy of an expert is on another host already; leave it out",
        ),
        (
            (arguments.eep_on_lost_coverage or "refuse") != "refuse",
            "it does not go together with --eep-on-lost-coverage mask or make-room: hosts do not agree on what to mask or to "
            "make room for; leave it out",
        ),
    ):
        if is_wrong:
            raise SystemExit(f"--nnodes: {why}")
    if device != "cpu":
        return  # ranks on a GPU do not show their experts to other hosts: what a host lacks comes from the disk
    from eep.experts.backup import transfer_engine

    try:
        transfer_engine.require_mooncake()
    except EepError as error:
        raise SystemExit(f"--nnodes: experts are read from other hosts with Mooncake: {error}") from None


def _check_links(provider: str, address: str) -> None:
    """SystemExit if no link can be opened at that address."""
    try:
        parsed = ip_address(address)
    except ValueError:
        raise SystemExit(f"--eep-address {address!r} is no address; give one such as 10.0.0.1, not a name") from None
    if parsed.is_unspecified or parsed.is_multicast:
        raise SystemExit(
            f"--eep-address {address}: name one address of this host, the one at which the others reach it"
        )
    with socket.socket(socket.AF_INET6 if parsed.version == 6 else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise SystemExit(
                f"--eep-address {address} is not an address of this host ({error.strerror}); 'ip address' lists them"
            ) from None
    try:
        NativeTransport(native.load(), provider, address).close()
    except EepError as error:
        raise SystemExit(f"--eep-provider {provider}: {error}") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
