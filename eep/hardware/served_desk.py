"""Where the watch of devices tells what it saw: to the server, if ranks are to be replaced, and else to the supervisor.

A server carries out one operation on ranks after the other, so it must hear of every one. To fence a rank is no operation:
the supervisor does it at once, also while the server does not answer.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from eep.console.api_client import ApiError
from eep.console.server_choice import api_in
from eep.hardware.evidence import BadEvidence, Evidence, UnknownHardware
from eep.hardware.evidence_desk import EvidenceDesk
from eep.hardware.reaction_table import Reaction, ReactionTable
from eep.operations.operation_runner import OrderRefused

_ANSWERS_WITHIN = 30.0
_OF_ANOTHER = (401, 403)
"""What answers at that address does not know this directory's key."""


class ServedDesk:
    """``own``: who acts on it where no server answers."""

    def __init__(self, directory: Path, table: ReactionTable, own: EvidenceDesk) -> None:
        self._directory, self._table, self._own = directory, table, own

    async def hear(self, given: Evidence) -> dict[str, Any]:
        """See :meth:`EvidenceDesk.hear`."""
        api = api_in(self._directory)
        if api is None or self._table.reaction_to(given.reason, given.severity) is not Reaction.REPLACE:
            return await self._own.hear(given)
        try:
            told: dict[str, Any] = await asyncio.to_thread(
                api.post, "/eep/evidence", msgspec.structs.asdict(given), _ANSWERS_WITHIN
            )
        except ApiError as error:
            if error.status in _OF_ANOTHER:
                return await self._own.hear(given)
            if error.status == 404:
                raise UnknownHardware(str(error)) from error
            if error.status in (400, 409):
                raise BadEvidence(str(error)) from error
            raise OrderRefused(str(error)) from error
        except (OSError, ValueError):  # it is not there, or says nothing that can be read
            return await self._own.hear(given)
        return told
