"""Figures for Prometheus: where the instance stands, what was lost and repaired, and how long that took.

Each process writes them where the server's own endpoint collects them: the multiprocess folder of ``prometheus_client``,
which SGLang makes for ``--enable-metrics`` and names in ``PROMETHEUS_MULTIPROC_DIR``. Without that folder no process writes
anything. The supervisor writes about views and incarnations, the front end about requests, each rank about its steps and
experts. They write when a view changes, never in a step.

:func:`add_effect`, which is pure, decides what an effect of the supervisor means for the figures.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from eep.membership.effects import Effect, Launch, Notify, PhaseChanged, RankGone
from eep.membership.records import Phase

logger = logging.getLogger(__name__)
DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure as Prometheus knows it. Prometheus shows the name of a counter with ``_total`` at its end."""

    kind: str
    name: str
    help: str
    label: str = ""


METRICS = {
    "epoch": Metric("gauge", "eep_epoch", "The epoch of the committed view."),
    "active": Metric("gauge", "eep_active_ranks", "Ranks in the committed view."),
    "deaths": Metric(
        "counter", "eep_rank_deaths", "Incarnations of ranks that ended without having been asked to leave."
    ),
    "joins": Metric(
        "counter", "eep_rank_joins", "Incarnations of ranks that entered a running view, first ones included."
    ),
    "relaunches": Metric("counter", "eep_rank_relaunches", "Processes started for a rank that had one before."),
    "view_seconds": Metric(
        "gauge", "eep_last_view_seconds", "Of the last loss: from its first sign to the view without the lost ranks."
    ),
    "repair_seconds": Metric(
        "gauge",
        "eep_last_repair_seconds",
        "Of the last view: from its commit until all its ranks had settled in it.",
    ),
    "pause_seconds": Metric(
        "gauge", "eep_last_pause_seconds", "Of the last change: how long no rank could commit a step."
    ),
    "rejoin_seconds": Metric(
        "gauge",
        "eep_last_rejoin_seconds",
        "Of the last rank that came back: from the first sign of its loss until it ran in a view again.",
    ),
    "steps_repeated": Metric("counter", "eep_steps_repeated", "Forward passes that ranks ran again, over all ranks."),
    "requests_moved": Metric("counter", "eep_requests_moved", "Requests that went on at another rank or incarnation."),
    "kv_restored": Metric(
        "counter",
        "eep_kv_restored_tokens",
        "Tokens of moved requests whose cache entries came from a lost rank: from its cache, or its copy in host memory.",
        "source",
    ),
    "kv_recomputed": Metric(
        "counter", "eep_kv_recomputed_tokens", "Tokens of moved requests that are computed again, or were there."
    ),
    "kv_backup_covered": Metric(
        "gauge",
        "eep_kv_backup_covered_tokens",
        "Tokens of open requests whose cache entries are in host memory too.",
        "rank",
    ),
    "kv_backup_lag": Metric(
        "gauge", "eep_kv_backup_lag_tokens", "Tokens of open requests that are still to be copied there.", "rank"
    ),
    "repair_bytes": Metric(
        "counter", "eep_repair_bytes", "Bytes of experts that ranks brought in, by the tier they came from.", "tier"
    ),
}


@dataclass(frozen=True, slots=True)
class Tally:
    """The sum of a supervisor's effects. Its figures have the names of :data:`METRICS`."""

    epoch: int = 0
    active: int = 0
    deaths: int = 0
    joins: int = 0
    relaunches: int = 0
    view_seconds: float = 0.0
    repair_seconds: float = 0.0
    pause_seconds: float = 0.0
    rejoin_seconds: float = 0.0
    _lives: frozenset[tuple[int, int]] = frozenset()
    """(rank, incarnation) of each member of the last view that ran."""
    _launched: frozenset[int] = frozenset()
    _stopped_at: float | None = None
    """Since when no rank can commit a step; None while ranks can."""
    _lost_at: float | None = None
    """When the loss was first seen that no view has followed yet."""
    _agreed_at: float | None = None
    _gone_at: frozenset[tuple[int, float]] = frozenset()
    """Ranks that were lost and are not back yet, and when that was first seen."""


FIGURES = tuple(each.name for each in fields(Tally) if not each.name.startswith("_"))


def add_effect(tally: Tally, effect: Effect, now: float) -> Tally:
    """The tally after one more effect, at ``now`` seconds of any steady clock."""
    match effect:
        case Launch(rank=rank):
            again = rank in tally._launched
            return replace(tally, relaunches=tally.relaunches + again, _launched=tally._launched | {rank})
        case Notify(view=view, phase=phase):
            tally = replace(tally, epoch=view.epoch, active=len(view.active))
            if phase is not Phase.RUN:
                return tally
            lives = frozenset((rank, view.incarnations[rank]) for rank in view.active)
            back = {(rank, since) for rank, since in tally._gone_at if rank in view.active}
            return replace(
                tally,
                joins=tally.joins + len(lives - tally._lives),
                rejoin_seconds=max((now - since for _, since in back), default=tally.rejoin_seconds),
                _lives=lives,
                _gone_at=tally._gone_at - back,
            )
        case RankGone(rank=rank, asked_to_leave=asked_to_leave):
            is_first = not asked_to_leave and rank not in {each for each, _ in tally._gone_at}
            gone = {(rank, now)} if is_first else set()
            return replace(tally, deaths=tally.deaths + (not asked_to_leave), _gone_at=tally._gone_at | gone)
        case PhaseChanged(phase=entered):
            return _after_phase(tally, entered, now)
    return tally


def _after_phase(tally: Tally, phase: str, now: float) -> Tally:
    """A change begins with the first sign of a loss or with the view that admits a joiner, and ends when all ranks run.
    A rank that is lost meanwhile is part of it."""
    stopped, lost, agreed = tally._stopped_at, tally._lost_at, tally._agreed_at
    match phase:
        case "REVOKED":
            return replace(
                tally, _stopped_at=now if stopped is None else stopped, _lost_at=now if lost is None else lost
            )
        case "AGREED" | "FORMING":  # forming: no rank is left
            return replace(
                tally,
                view_seconds=tally.view_seconds if lost is None else now - lost,
                _stopped_at=now if stopped is None else stopped,
                _lost_at=None,
                _agreed_at=now,
            )
        case "RUN" if stopped is not None:
            return replace(
                tally,
                repair_seconds=tally.repair_seconds if agreed is None else now - agreed,
                pause_seconds=now - stopped,
                _stopped_at=None,
                _lost_at=None,
                _agreed_at=None,
            )
    return tally


_named: str | None = None
"""The name that the files of other libraries bear."""


class MetricsWriter:
    """Writes the figures of one process, which ``who`` names within the server. The incarnations of a rank write to the
    same files, one after the other: so counts go on and files do not pile up. Without a directory the writer does nothing.

    A lost figure never stops the server: the writer logs the first error and writes no more.
    """

    def __init__(self, who: str) -> None:
        self._value_class = _value_class(who)
        self._values: dict[tuple[str, str], Any] = {}

    def add(self, figure: str, amount: float = 1, label: str = "") -> None:
        """Adds to a counter. An amount of 0 makes Prometheus show the counter from now on."""
        self._write(figure, label, lambda value: value.inc(amount))

    def set(self, figure: str, value: float, label: str = "") -> None:
        self._write(figure, label, lambda held: held.set(value, timestamp=time.time()))

    def _write(self, figure: str, label: str, write: Callable[[Any], None]) -> None:
        if self._value_class is None:
            return
        try:
            write(self._value(figure, label))
        except (OSError, ValueError) as error:
            self._value_class = None
            logger.warning("eep: this process writes no more metrics: %s", error)

    def _value(self, figure: str, label: str) -> Any:
        found = self._values.get((figure, label))
        if found is None:
            metric = METRICS[figure]
            shown = f"{metric.name}_total" if metric.kind == "counter" else metric.name
            names, labels = ((metric.label,), (label,)) if metric.label else ((), ())
            assert self._value_class is not None
            found = self._value_class(
                metric.kind, metric.name, shown, names, labels, metric.help, multiprocess_mode="mostrecent"
            )
            self._values[figure, label] = found
        return found


def _value_class(who: str) -> Callable[..., Any] | None:
    """The class whose values live in the files of ``who``; None where metrics are off."""
    if not os.environ.get(DIRECTORY):
        return None
    try:
        values = importlib.import_module("prometheus_client.values")
    except ImportError:
        logger.warning("eep: %s is set, but prometheus_client is not installed; install it to get metrics", DIRECTORY)
        return None
    made: Callable[..., Any] = values.MultiProcessValue(lambda: f"eep-{who}")
    return made


def name_metric_files(who: str) -> None:
    """Have all metrics that this process makes from now on, those of other libraries too, live in files that bear the name
    ``who`` and not the number of this process. So the next life of a rank goes on with the counts of the last, and files,
    which every scrape reads, do not pile up. Another name moves all of them to other files."""
    if os.environ.get(DIRECTORY):
        with suppress(ImportError):
            values: Any = importlib.import_module("prometheus_client.values")
            global _named
            if _named is None:
                values.ValueClass = values.MultiProcessValue(lambda: _named)
            _named = who


class InstanceMetrics:
    """The supervisor's figures. Pass it to :meth:`eep.control.supervisor.supervisor.Supervisor.watch_effects`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._writer, self._clock = MetricsWriter("supervisor"), clock
        self._tally = Tally()
        for figure in FIGURES:  # an alert cannot watch a counter that is missing until something goes wrong
            self._tell(figure, 0, 0)

    def __call__(self, effect: Effect) -> None:
        before, self._tally = self._tally, add_effect(self._tally, effect, self._clock())
        for figure in FIGURES:
            was, now = getattr(before, figure), getattr(self._tally, figure)
            if was != now:
                self._tell(figure, was, now)

    def _tell(self, figure: str, was: float, now: float) -> None:
        if METRICS[figure].kind == "counter":
            self._writer.add(figure, now - was)
        else:
            self._writer.set(figure, now)


class RankMetrics:
    """A rank's own counts. The rank tells them once in a view."""

    def __init__(self, rank: int) -> None:
        self._writer = MetricsWriter(f"rank-{rank}")
        self._told: Counter[tuple[str, str]] = Counter()
        self.tell(0, {})

    def tell(self, steps_repeated: int, repair_bytes: Mapping[str, int]) -> None:
        """Both count since this incarnation began. ``repair_bytes``: by the name of the tier they came from."""
        self._add("steps_repeated", "", steps_repeated)
        for tier, count in repair_bytes.items():
            self._add("repair_bytes", tier, count)

    def _add(self, figure: str, label: str, count: int) -> None:
        self._writer.add(figure, count - self._told[figure, label], label)
        self._told[figure, label] = count
