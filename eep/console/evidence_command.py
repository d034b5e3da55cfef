"""``eep evidence``: tell a server that hardware fails, as a device plugin or a script does."""

from __future__ import annotations

import argparse
import uuid
from typing import Any

from eep.console.printable import printable
from eep.console.rank_argument import rank_number
from eep.console.server_choice import ServerChoice, add_server
from eep.console.told_shapes import EvidenceShape

_ANSWERS_WITHIN = 30.0


def register_evidence(commands: Any) -> None:
    command = commands.add_parser("evidence", help="tell a server that the hardware of ranks fails")
    command.add_argument("reason", help="a sign that the server's table knows, such as xid.79, or any other word")
    where = command.add_mutually_exclusive_group(required=True)
    where.add_argument("--rank", type=rank_number, help="the rank whose hardware fails")
    where.add_argument("--device", help="the device that fails, such as the UUID of a GPU")
    where.add_argument("--host", help="the host that fails")
    command.add_argument(
        "--severity",
        choices=("fatal", "warning", "info"),
        default="warning",
        help="what to make of a reason that the table does not know (default: warning)",
    )
    command.add_argument("--detail", default="", help="a text for the event log")
    command.add_argument("--id", default="", help="name of the evidence; repeating a name does nothing twice")
    command.set_defaults(run=_tell)
    add_server(command)


def _tell(options: argparse.Namespace) -> int:
    server = ServerChoice.of(options)
    if server.api is None:
        raise ValueError("the server does not say where it serves HTTP; give --url")
    where = {name: getattr(options, name) for name in ("rank", "device", "host") if getattr(options, name) is not None}
    given = {"id": options.id or uuid.uuid4().hex, "reason": options.reason, **where, "severity": options.severity}
    told = server.api.post("/eep/evidence", {**given, "detail": options.detail}, _ANSWERS_WITHIN, EvidenceShape)
    print(printable(f"{told['reaction']}: ranks {', '.join(map(str, told['ranks']))}"))
    return 0
