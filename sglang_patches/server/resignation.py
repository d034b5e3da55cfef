"""When a server ends by itself: it resigns once the ranks that may still come are too few to serve.

The controller sees that and says why, in a file of the server's directory. The front end reads the file, answers its clients
and ends the server with a status other than 0, for an orchestrator to start it again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from eep.membership import Policy
from eep.membership.state import LocalRank, RankStatus

logger = logging.getLogger(__name__)
_MOST_BYTES = 4096


def why_to_resign(ranks: Mapping[int, LocalRank], policy: Policy, fewest: int) -> str | None:
    """Why the instance will not serve again by itself; None if it may. ``fewest``: how many of ``ranks`` it takes. Where
    ranks are not relaunched, an operator launches them, and no server resigns."""
    if policy.relaunch_limit == 0:
        return None
    out = (RankStatus.DOWN, RankStatus.STUCK)
    given_up = [
        rank
        for rank, local in sorted(ranks.items())
        if local.status is RankStatus.DOWN and local.failures > policy.relaunch_limit
    ]
    left = sum(local.status not in out for local in ranks.values())
    if not given_up or left >= fewest:
        return None
    named = f"rank {given_up[0]}" if len(given_up) == 1 else f"ranks {', '.join(map(str, given_up))}"
    return (
        f"{named} failed more than {policy.relaunch_limit} times in a row, and the supervisor gave up; {left} may still "
        f"serve, and it takes {fewest}"
    )


def announce(directory: Path, why: str) -> None:
    """Tell the front end. If that cannot be told, SystemExit: SGLang then ends the server, without a word to its clients."""
    logger.error("the server ends: %s. The output of the ranks says why they failed", why)
    fresh = _path(directory).with_suffix(".new")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(why)
        fresh.rename(_path(directory))
    except OSError as error:
        logger.error("the front end could not be told: %s", error)
        raise SystemExit(1) from None


def read(directory: Path) -> str | None:
    """Why the server is to end; None while it is not."""
    try:
        with _path(directory).open() as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return None


def _path(directory: Path) -> Path:
    return directory / "resignation"
