"""Figures that a thread of the front end looks up now and then, for Prometheus: margin, coverage, spares, open requests, and
what is kept in memory.

No step waits for it, and without ``--enable-metrics`` there is no thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eep.anchor.held_kinds import sum_held
from eep.control.private_directory import PrivateDirectory
from eep.observe.metrics import DIRECTORY, MetricsWriter
from eep.operations.held_experts import HeldExperts, read_held
from eep.operations.host_status import read_status

LOOKS_EVERY = 5.0

logger = logging.getLogger(__name__)


def figures_of(status: Mapping[str, Any], held: HeldExperts, *, masks: bool) -> dict[str, float]:
    """What a status and what ranks hold mean for the gauges. What is not known now is left as it was. Pure."""
    found: dict[str, float] = {}
    if status.get("margin") is not None:
        found["margin_any"] = status["margin"]["any_ranks"]
        found["margin_repairable"] = status["margin"]["repairable_ranks"]
    if held.copies and status["phase"] == "RUN":
        found["uncovered"] = held.uncovered
        found["masked"] = held.uncovered if masks else 0
    if status.get("backup") is not None:
        found["backup_held"], found["backup_bytes"] = status["backup"]["held"], status["backup"]["bytes"]
        if status["backup"]["wanted"] is not None:
            found["backup_wanted"] = status["backup"]["wanted"]
    return found


def spares_of(status: Mapping[str, Any]) -> tuple[str, dict[str, float]]:
    """Their kind, and how many there are. Pure."""
    spares = status.get("spares")
    if not spares:
        return "", {}
    return spares["kind"], {"spares_ready": spares["ready"], "spares_wanted": spares["wanted"]}


class ServerGauges:
    """``requests()``: how many are open, and how many of them wait."""

    def __init__(self, directory: Path, requests: Callable[[], tuple[int, int]], *, masks: bool) -> None:
        self._directory, self._requests, self._masks = directory, requests, masks
        self._writer = MetricsWriter("front-end-gauges")
        self._news = threading.Event()
        if os.environ.get(DIRECTORY):
            threading.Thread(target=self._run, name="eep-gauges", daemon=True).start()

    def look_soon(self) -> None:
        """A view runs."""
        self._news.set()

    def look(self) -> None:
        """Once. OSError if the supervisor does not answer."""
        for figure, count in zip(("requests_open", "requests_waiting"), self._requests(), strict=True):
            self._writer.set(figure, count)
        status = read_status(self._directory)
        lives = {int(rank): told["incarnation"] for rank, told in status["ranks"].items() if told["in"]}
        held = read_held(PrivateDirectory(self._directory).experts, lives)
        for figure, value in figures_of(status, held, masks=self._masks).items():
            self._writer.set(figure, value)
        kind, spares = spares_of(status)
        for figure, value in spares.items():
            self._writer.set(figure, value, kind)
        for kind, size in sum_held(status["anchored"] or ()).items():
            self._writer.set("anchored_bytes", size, kind)

    def _run(self) -> None:
        while True:
            try:
                self.look()
            except FileNotFoundError:
                return  # the server ends, and its directory is gone
            except (OSError, ValueError, KeyError) as error:
                logger.debug("eep: gauges: %s", error)
            self._news.wait(LOOKS_EVERY)
            self._news.clear()
