"""The status of a host: what its supervisor says, and what lies beside it in its directory."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eep.anchor.anchor import AnchorGone, list_held
from eep.control.private_directory import PrivateDirectory
from eep.control.wire.client import ask_supervisor
from eep.control.wire.messages import AskStatus
from eep.experts.balancing.balance_record import read_balance
from eep.experts.margin_record import read_margin
from eep.faults.orders import allowed_in


def read_status(directory: Path) -> dict[str, Any]:
    """Asks the supervisor of ``directory``, for up to 10 s. OSError if it does not answer."""
    status: dict[str, Any] = json.loads(ask_supervisor(directory, AskStatus()).body)
    try:
        status["anchored"] = [asdict(held) for held in list_held(directory)]
    except AnchorGone:
        status["anchored"] = None
    experts = PrivateDirectory(directory).experts
    status["margin"] = read_margin(experts, status["epoch"])
    status["balance"] = read_balance(experts, status["epoch"])
    status["faults_allowed"] = allowed_in(directory)
    return status
