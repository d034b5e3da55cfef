"""Figures for Prometheus: where the instance stands, what was lost and repaired, and how long that took.

Each process writes them where the server's own endpoint collects them: the multiprocess folder of ``prometheus_client``,
which SGLang makes for ``--enable-metrics`` and names in ``PROMETHEUS_MULTIPROC_DIR``. Without that folder no process writes
anything. The supervisor writes about views and incarnations, the front end about requests, each rank about its steps and
experts. They write when a view changes, and a rank after many
steps, never in one.

:mod:`.instance_tally`, which is pure, decides what an effect of the supervisor means for the figures.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from eep.membership.effects import Effect, LossCause, RankGone
from eep.observe.instance_tally import FIGURES, Tally, add_effect
from eep.observe.metric_table import BUCKETS, METRICS, bucket_of

logger = logging.getLogger(__name__)
DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
_SUM = "sum"


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

    def observe(self, figure: str, seconds: float) -> None:
        """Adds to a histogram."""
        self._write(figure, _bound(bucket_of(seconds)), lambda value: value.inc(1))
        self._write(figure, _SUM, lambda value: value.inc(seconds))

    def begin_histogram(self, figure: str) -> None:
        """Makes Prometheus show the histogram from now on, without an observation."""
        for label in (*map(_bound, BUCKETS), _SUM):
            self._write(figure, label, lambda value: value.inc(0))

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
            if metric.kind == "histogram":
                shown = f"{metric.name}_sum" if label == _SUM else f"{metric.name}_bucket"
                names, labels = ((), ()) if label == _SUM else (("le",), (label,))
            assert self._value_class is not None
            found = self._value_class(
                metric.kind, metric.name, shown, names, labels, metric.help, multiprocess_mode="mostrecent"
            )
            self._values[figure, label] = found
        return found


def _bound(seconds: float) -> str:
    """As Prometheus writes it."""
    return "+Inf" if seconds == math.inf else str(seconds)


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
        for cause in LossCause:
            self._writer.add("losses", 0, cause.value)
        for figure, metric in METRICS.items():
            if metric.kind == "histogram":
                self._writer.begin_histogram(figure)

    def __call__(self, effect: Effect) -> None:
        before, self._tally = self._tally, add_effect(self._tally, effect, self._clock())
        for figure in FIGURES:
            was, now = getattr(before, figure), getattr(self._tally, figure)
            if was != now:
                self._tell(figure, was, now)
        for figure, seconds in self._tally.observed:
            self._writer.observe(figure, seconds)
        if isinstance(effect, RankGone):
            self._writer.add("losses", 1, effect.kind.value)

    def _tell(self, figure: str, was: float, now: float) -> None:
        if METRICS[figure].kind == "counter":
            self._writer.add(figure, now - was)
        else:
            self._writer.set(figure, now)


class RankMetrics:
    """A rank's own counts. The rank tells them once in a view."""

    def __init__(self, rank: int) -> None:
        self._rank, self._writer = rank, MetricsWriter(f"rank-{rank}")
        self._told: Counter[tuple[str, str]] = Counter()
        self.tell(0, {})

    def tell(self, steps_repeated: int, repair_bytes: Mapping[str, int]) -> None:
        """Both count since this incarnation began. ``repair_bytes``: by the name of the tier they came from."""
        self._add("steps_repeated", "", steps_repeated)
        for tier, count in repair_bytes.items():
            self._add("repair_bytes", tier, count)

    def tell_overhead(self, seconds: float) -> None:
        """What a step of this rank pays for bookkeeping."""
        self._writer.set("step_overhead", seconds, str(self._rank))

    def _add(self, figure: str, label: str, count: int) -> None:
        self._writer.add(figure, count - self._told[figure, label], label)
        self._told[figure, label] = count
