"""What becomes of a supervisor's effects in Prometheus: first the pure tally, then what a scrape of all processes shows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from eep.membership import Effect, Launch, Notify, Phase, PhaseChanged, RankGone
from eep.observe.instance_tally import FIGURES, Tally, add_effect
from eep.observe.metric_table import BUCKETS, METRICS, bucket_of
from eep.observe.metrics import DIRECTORY, InstanceMetrics, MetricsWriter, RankMetrics
from eep.view import NEVER, View

Timed = tuple[float, Effect]


def view(epoch: int, *lives: int | None) -> View:
    """Each rank's incarnation, or None for a rank that is out."""
    active = tuple(rank for rank, life in enumerate(lives) if life is not None)
    return View(epoch, active, tuple(NEVER if life is None else life for life in lives))


def whole(phase: str, epoch: int = 0) -> PhaseChanged:
    return PhaseChanged(phase, epoch)


def tally(effects: Iterable[Timed]) -> Tally:
    found = Tally()
    for now, effect in effects:
        found = add_effect(found, effect, now)
    return found


STARTED: list[Timed] = [
    (0.0, Launch(0, 0, "")),
    (0.0, Launch(1, 0, "")),
    (9.0, Notify(view(1, 0, 0), Phase.AGREED)),
    (9.0, whole("AGREED")),
    (9.5, Notify(view(1, 0, 0), Phase.RUN)),
    (9.5, whole("RUN")),
]
LOST: list[Timed] = [
    (20.0, RankGone(1, 0, "it is dying")),
    (20.0, whole("REVOKED")),
    (21.0, Notify(view(2, 0, None), Phase.AGREED)),
    (21.0, whole("AGREED")),
    (21.5, whole("REPAIRED")),
    (23.0, Notify(view(2, 0, None), Phase.RUN)),
    (23.0, whole("RUN")),
    (23.0, Launch(1, 1, "")),
]
BACK: list[Timed] = [
    (30.0, Notify(view(3, 0, 1), Phase.AGREED)),
    (30.0, whole("AGREED")),
    (30.25, Notify(view(3, 0, 1), Phase.RUN)),
    (30.25, whole("RUN")),
]


def test_how_long_a_rank_was_away() -> None:
    """From the first sign, also if its next life was lost before it was in; of several, the longest."""
    back: list[Timed] = [
        (23.0, Launch(1, 1, "")),
        (24.0, RankGone(1, 1, "it failed")),
        (25.0, Launch(1, 2, "")),
        (26.0, RankGone(0, 0, "it is dying")),
        (26.0, Notify(view(3, None, 2), Phase.AGREED)),
        (26.0, whole("AGREED")),
    ]
    assert tally([*STARTED, *LOST, *back]).rejoin_seconds == 0.0
    one = [*STARTED, *LOST, *back, (26.5, Notify(view(3, None, 2), Phase.RUN))]
    assert tally(one).rejoin_seconds == 6.5
    assert tally([*one, (30.0, Notify(view(4, 1, 2), Phase.RUN))]).rejoin_seconds == 4.0
    left: list[Timed] = [(40.0, RankGone(1, 2, "asked", asked_to_leave=True)), (50.0, Notify(view(6, 1, 3), Phase.RUN))]
    assert tally([*one, (30.0, Notify(view(4, 1, 2), Phase.RUN)), *left]).rejoin_seconds == 4.0


def test_a_start() -> None:
    found = tally(STARTED)
    assert (found.epoch, found.active, found.joins, found.deaths, found.relaunches) == (1, 2, 2, 0, 0)


def test_a_loss() -> None:
    found = tally([*STARTED, *LOST])
    assert (found.epoch, found.active, found.joins, found.deaths, found.relaunches) == (2, 1, 2, 1, 1)
    assert (found.view_seconds, found.repair_seconds, found.pause_seconds) == (1.0, 2.0, 3.0)


def test_a_rejoin_pauses_too_but_counts_no_death() -> None:
    found = tally([*STARTED, *LOST, *BACK])
    assert (found.epoch, found.active, found.joins, found.deaths) == (3, 2, 3, 1)
    assert (found.view_seconds, found.repair_seconds, found.pause_seconds) == (1.0, 0.25, 0.25)


def test_a_second_loss_is_part_of_the_same_pause() -> None:
    found = tally(
        [
            *STARTED,
            (20.0, whole("REVOKED")),
            (21.0, whole("AGREED")),
            (24.0, whole("REVOKED")),
            (24.5, whole("AGREED")),
            (26.0, whole("RUN")),
        ]
    )
    assert (found.view_seconds, found.repair_seconds, found.pause_seconds) == (0.5, 1.5, 6.0)


def test_when_no_rank_is_left_the_pause_lasts_until_one_runs() -> None:
    found = tally(
        [
            *STARTED,
            (20.0, whole("REVOKED")),
            (20.5, Notify(view(2, None, None), Phase.RUN)),
            (20.5, whole("FORMING")),
            (28.0, Notify(view(3, 1, None), Phase.AGREED)),
            (28.0, whole("AGREED")),
            (28.5, Notify(view(3, 1, None), Phase.RUN)),
            (28.5, whole("RUN")),
        ]
    )
    assert (found.active, found.joins) == (1, 3)
    assert (found.view_seconds, found.repair_seconds, found.pause_seconds) == (0.5, 0.5, 8.5)


def test_a_rank_that_was_asked_to_leave_has_not_died() -> None:
    left: list[Timed] = [(21.0, RankGone(1, 0, "it exited", asked_to_leave=True))]
    assert tally([*STARTED, *left]).deaths == 0
    assert tally([*STARTED, *left, (30.0, RankGone(1, 1, "it exited"))]).deaths == 1, "the next life was not asked"


def observed(effects: Iterable[Timed]) -> list[tuple[str, float]]:
    found, told = Tally(), []
    for now, effect in effects:
        found = add_effect(found, effect, now)
        told += found.observed
    return told


def test_each_change_is_observed_once() -> None:
    lost = observed([*STARTED, *LOST])[len(observed(STARTED)) :]
    assert lost == [("view_time", 1.0), ("pause_time", 3.0), ("repair_time", 2.0)]
    back = observed([*STARTED, *LOST, *BACK])[len(observed([*STARTED, *LOST])) :]
    assert back == [("rejoin_time", 10.25), ("pause_time", 0.25), ("repair_time", 0.25)]


def test_a_time_is_in_the_first_bucket_that_holds_it() -> None:
    assert [bucket_of(seconds) for seconds in (0.0, 0.005, 0.0051, 119.0)] == [0.005, 0.005, 0.01, 120.0]
    assert bucket_of(1e9) == BUCKETS[-1]


def test_every_figure_has_a_name() -> None:
    assert set(FIGURES) < set(METRICS)
    assert all(metric.name.startswith("eep_") and metric.help.endswith(".") for metric in METRICS.values())


# What a scrape shows.


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    return tmp_path


def scrape(directory: Path) -> dict[str, float]:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(directory))
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_a_scrape_shows_what_the_supervisor_did(directory: Path) -> None:
    now = [0.0]
    metrics = InstanceMetrics(lambda: now[0])
    assert scrape(directory)["eep_rank_deaths_total"] == 0, "shown before there is one"
    for now[0], effect in [*STARTED, *LOST]:
        metrics(effect)
    found = scrape(directory)
    assert found["eep_epoch"] == 2
    assert found["eep_active_ranks"] == 1
    assert found["eep_rank_deaths_total"] == 1
    assert found["eep_rank_joins_total"] == 2
    assert found["eep_rank_relaunches_total"] == 1
    assert found["eep_last_pause_seconds"] == 3.0
    assert found['eep_rank_losses_total{cause="exit"}'] == 1
    assert found['eep_rank_losses_total{cause="stopped"}'] == 0
    assert found["eep_rejoin_seconds_count"] == 0
    # The start is a change too: half a second until all ranks of the first view had settled.
    assert (found["eep_pause_seconds_count"], found["eep_pause_seconds_sum"]) == (2, 3.5)
    assert [found[f'eep_pause_seconds_bucket{{le="{bound}"}}'] for bound in ("0.25", "0.5", "2.5", "5.0", "+Inf")] == [
        *(0, 1, 1, 2, 2)
    ]


def test_the_lives_of_a_rank_count_on_in_the_same_files(directory: Path) -> None:
    life = (
        "from eep.observe.metrics import RankMetrics\n"
        "metrics = RankMetrics(2)\n"
        "metrics.tell(1, {'peer': 10})\n"
        "metrics.tell(3, {'peer': 10, 'disk': 5})\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", life], timeout=60, check=False)
    RankMetrics(0).tell(1, {"peer": 1})
    found = scrape(directory)
    assert found["eep_steps_repeated_total"] == 7
    assert found['eep_repair_bytes_total{tier="peer"}'] == 21
    assert found['eep_repair_bytes_total{tier="disk"}'] == 10
    assert sorted(file.name for file in directory.iterdir()) == ["counter_eep-rank-0.db", "counter_eep-rank-2.db"]


def test_nothing_is_written_where_metrics_are_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(DIRECTORY, raising=False)
    monkeypatch.chdir(tmp_path)
    RankMetrics(0).tell(1, {"peer": 1})
    InstanceMetrics()(Launch(0, 0, ""))
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_gone_costs_the_figures_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DIRECTORY, str(directory / "gone"))
    writer = MetricsWriter("front-end")
    writer.add("requests_moved", 2)
    writer.add("requests_moved", 2)
    assert len([record for record in caplog.records if "writes no more metrics" in record.message]) == 1


LIFE = """
import os, signal
from eep.observe.metrics import name_metric_files
name_metric_files("rank-1")
from prometheus_client import Counter, Gauge
Counter("served", "").inc(2)
Gauge("waiting", "", multiprocess_mode="all").set(5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_lives_of_a_rank_write_all_their_metrics_to_the_same_files(directory: Path) -> None:
    """Also those of the server's own, which would otherwise leave files with the number of each process."""
    for _ in range(3):
        life = subprocess.run([sys.executable, "-c", LIFE], check=False)
        assert life.returncode == -signal.SIGKILL
    assert sorted(os.listdir(directory)) == ["counter_rank-1.db", "gauge_all_rank-1.db"]
    shown = scrape(directory)
    assert shown["served_total"] == 6
    assert shown['waiting{pid="rank-1"}'] == 5
