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


def test_the_dashboard_shows_every_metric() -> None:
    """But for those that a histogram shows better, and those with which the panels of counters begin."""
    asked = set().union(*(named(each) for each in expressions(json.loads((PLACE / "dashboard.json").read_text()))))
    missing = {
        metric.name for metric in METRICS.values() if not asked & {metric.name + end for end in SHOWN[metric.kind]}
    }
    assert {name for name in missing if not name.startswith("eep_last_")} == {"eep_rank_deaths"}


def test_the_containers_find_what_is_mounted() -> None:
    yaml = pytest.importorskip("yaml")

    def read(path: str) -> Any:
        return yaml.safe_load((PLACE / path).read_text())

    services = read("compose.yaml")["services"]
    mounted = {name: dict(each.split(":")[:2] for each in service["volumes"]) for name, service in services.items()}
    files = {source: target for each in mounted.values() for source, target in each.items() if source.startswith("./")}
    assert [source for source in files if not (PLACE / source).exists()] == []
    (rules,) = read("prometheus.yml")["rule_files"]
    assert files[f"./{rules}"] == f"/etc/prometheus/{rules}", "it looks beside its own file"
    (provider,) = read("grafana/provisioning/dashboards/eep.yml")["providers"]
    assert files["./dashboard.json"] == f"{provider['options']['path']}/dashboard.json"
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == files["./dashboard.json"]
    (source,) = read("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert f"--web.listen-address={source['url'].removeprefix('http://')}" in services["prometheus"]["command"]
    assert {service["network_mode"] for service in services.values()} == {"host"}, "the server listens on this machine"


COMMANDS = ("check rules eep_rules.yml", "check config prometheus.yml", "test rules eep_rules_test.yml")


@pytest.mark.parametrize("command", COMMANDS)
def test_prometheus_accepts_the_rules(command: str) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool, of Debian's prometheus")
    done = subprocess.run(
        ["promtool", *command.split()], cwd=PLACE, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
