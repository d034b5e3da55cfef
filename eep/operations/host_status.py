"""The status of a host: what its supervisor says, and what lies beside it in its directory."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eep.anchor.anchor import AnchorGone, list_held
from eep.control.private_directory import PrivateDirectory
from eep.control.wire.client import ask_supervisor
from eep.control.wire.messages import AskStatus
from eep.experts.backup.backup_standing import read_backup
from eep.experts.balancing.balance_record import read_balance
from eep.experts.margin_record import read_margin
from eep.experts.room_record import read_rooms
from eep.faults.orders import allowed_in
from eep.membership import host_of
from eep.operations.role_file import read_roles
from eep.requests.kv.copy_record import read_copies


def read_status(directory: Path) -> dict[str, Any]:
    """Asks the supervisor of ``directory``, for up to 10 s. OSError if it does not answer."""
    status: dict[str, Any] = json.loads(ask_supervisor(directory, AskStatus()).body)
    try:
        status["anchored"] = [asdict(held) for held in list_held(directory)]
    except AnchorGone:
        status["anchored"] = None
    lives = {int(rank): told["incarnation"] for rank, told in status["ranks"].items() if told["in"]}
    status["backup"] = _backup_of(directory, status.get("backup"))
    status["context_copies"] = read_copies(directory, lives)
    experts = PrivateDirectory(directory).experts
    status["margin"] = read_margin(experts, status["epoch"])
    name_hosts(status, socket.gethostname())
    status["balance"] = read_balance(experts, status["epoch"])
    rooms = read_rooms(experts, lives)
    experts_only = read_roles(directory)
    for number, told in status["ranks"].items():
        room = rooms.get(int(number))
        told["role"] = "experts" if int(number) in experts_only else "both"
        told["room_bytes"], told["room_tokens"] = (room.bytes, room.tokens) if room is not None else (0, 0)
    status["faults_allowed"] = allowed_in(directory)
    return status


def _backup_of(directory: Path, process: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What the supervisor says of the ``process``, and what that holds. None if there is to be none."""
    if process is None:
        return None
    found = read_backup(directory)
    return {**process, **asdict(found), "filled": found.is_filled}


def name_hosts(status: dict[str, Any], machine: str) -> None:
    """Says of each rank here on which host it is, and names the hosts that could go. Where there are several, a host has the
    name under which it is known to the others; otherwise it has that of the ``machine``."""
    several = status.get("links") is not None
    own = host_of(status["supervisor"]) if several else machine
    others: Mapping[str, list[int]] = status["other_hosts"]
    for told in status["ranks"].values():
        told["host"] = own
    names = {rank: name for name, ranks in others.items() for rank in ranks}
    names |= {int(number): own for number in status["ranks"]}
    if (margin := status["margin"]) is not None:
        margin["hosts"] = sorted(names[rank] for rank in margin["hosts"] if rank in names)
