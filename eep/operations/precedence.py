"""Which operations wait for their turn, which act at once, and which take the place of another. Pure.

Operations that start or end ranks run one after the other. What a front end does by itself, to drain or to give a rank
another role, waits for nobody: a server that is to end must be able to drain while a rank loads.
"""

from __future__ import annotations

from eep.operations.operation_request import OperationRequest

_OF_REQUESTS = ("drain", "undrain")


def subject_of(request: OperationRequest) -> tuple[str, int] | None:
    """What an operation that acts at once is about; None for one that waits for its turn."""
    if request.action in _OF_REQUESTS:
        return ("requests", -1)
    if request.action == "role":
        return ("role", -1 if request.rank is None else request.rank)
    return None


def takes_place_of(newer: OperationRequest, older: OperationRequest) -> bool:
    """Whether both cannot have their way. The newer one is what an operator wants now."""
    if subject_of(newer) is None or subject_of(newer) != subject_of(older):
        return False
    return (newer.action, newer.role) != (older.action, older.role)


def line_of(request: OperationRequest) -> str:
    """Operations of one line are counted together. Those that start or end ranks leave room for all others."""
    return "rank" if subject_of(request) is None else request.action
