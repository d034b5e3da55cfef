"""examples/monitoring: the rules are good rules, and every metric that rules and dashboard name exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eep.observe.metric_table import METRICS

PLACE = Path(__file__).parents[2] / "examples" / "monitoring"
SHOWN = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
NAMES = {metric.name + end for metric in METRICS.values() for end in SHOWN[metric.kind]}


def expressions(found: Any) -> Iterator[str]:
    """Every expression in a dashboard."""
    if isinstance(found, dict):
        yield from (str(found[name]) for name in ("expr", "query") if isinstance(found.get(name), str))
    for each in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from expressions(each)


def named(text: str) -> set[str]:
    return set(re.findall(r"\beep_[a-z_]+\b(?!\.yml)", text))


def test_every_metric_of_the_dashboard_exists() -> None:
    asked = set().union(*(named(each) for each in expressions(json.loads((PLACE / "dashboard.json").read_text()))))
    assert len(asked) > 15
    assert sorted(asked - NAMES) == []


def test_every_metric_of_the_rules_exists() -> None:
    asked = named((PLACE / "eep_rules.yml").read_text())
    assert len(asked) > 8
    assert sorted(name for name in asked if name not in NAMES and f"{name}_bucket" not in NAMES) == []


def test_no_two_panels_have_the_same_place() -> None:
    panels = json.loads((PLACE / "dashboard.json").read_text())["panels"]
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)


COMMANDS = ("check rules eep_rules.yml", "check config prometheus.yml", "test rules eep_rules_test.yml")


@pytest.mark.parametrize("command", COMMANDS)
def test_prometheus_accepts_the_rules(command: str) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool, of Debian's prometheus")
    done = subprocess.run(
        ["promtool", *command.split()], cwd=PLACE, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
