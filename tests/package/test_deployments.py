"""examples/kubernetes and examples/systemd: they are well-formed, and every route, flag and command that they name exists."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eep import cli
from eep.hardware.evidence import Evidence
from sglang_patches.front_end.routes import ALLOWED, OWN
from sglang_patches.options import drain_limit
from tests.sglang_patches.server.test_command_line import _PARSE, run_python

EXAMPLES = Path(__file__).parents[2] / "examples"
MANIFESTS = EXAMPLES / "kubernetes" / "server.yaml"
UNITS = sorted((EXAMPLES / "systemd").glob("*.service"))
PODS = EXAMPLES / "kubernetes" / "rank-per-pod.yaml"
PAGES = [MANIFESTS, PODS, *UNITS, *(EXAMPLES / name / "README.md" for name in ("kubernetes", "systemd"))]
VERSIONS = ("1.27", "1.35")
_AFTER_SIGTERM = 10.0
"""How long a server takes to end at most: docs/operate.md, Stopping."""


def documents() -> list[dict[str, Any]]:
    yaml: Any = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(MANIFESTS.read_text()))


def container() -> dict[str, Any]:
    (found,) = (each for each in documents() if each["kind"] == "Deployment")
    (server,) = found["spec"]["template"]["spec"]["containers"]
    return {**server, "grace": found["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]}


def pods() -> dict[str, Any]:
    """What the LeaderWorkerSet makes of each of its pods, and how many there are."""
    template: dict[str, Any] = pod_documents()[0]["spec"]["leaderWorkerTemplate"]
    return template


def pod_documents() -> list[dict[str, Any]]:
    yaml: Any = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(PODS.read_text()))


def settings(unit: Path, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


def server_commands() -> Iterator[list[str]]:
    yield [word for each in container()["command"] for word in each.split("=", 1)]
    for unit in UNITS:
        yield from (shlex.split(line) for line in settings(unit, "ExecStart") if "sglang.launch_server" in line)


def eep_commands() -> Iterator[list[str]]:
    """The words after ``eep``, wherever it is called."""
    yield shlex.split(container()["lifecycle"]["preStop"]["exec"]["command"][-1].split("; eep ")[1])
    for unit in UNITS:
        for line in settings(unit, "Exec[A-Za-z]*"):
            words = shlex.split(line)
            if words[0].endswith("/eep"):
                yield words[1:]


def test_every_route_exists() -> None:
    named = {
        path.partition("?")[0]
        for page in PAGES
        for path in re.findall(r"(?:path: |:30000|`)(/[a-z_/]+(?:\?ranks=\d+)?)[\s\"`]", page.read_text())
        if not path.startswith(("/run/", "/model"))
    }
    assert {"/eep/ready", "/health", "/eep/evidence"} <= named
    assert sorted(named - OWN - ALLOWED) == []


def test_every_flag_of_the_server_exists(sglang: None) -> None:
    commands = list(server_commands())
    assert len(commands) == 2
    asked = {word for command in commands for word in command if word.startswith("--")}
    mentioned = {
        flag
        for page in PAGES
        for flag in re.findall(r"(?<![\w-])--(?:eep|ep|enable|tp|dp|admin)-[a-z-]+", page.read_text())
    }
    assert {"--ep-backend", "--eep-anchor"} <= asked | mentioned
    known = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", run_python(_PARSE, "--help").stdout))
    assert sorted((asked | mentioned) - known) == []


def test_every_command_of_eep_exists_and_takes_its_options() -> None:
    commands = list(eep_commands())
    assert sorted(command[0] for command in commands) == ["anchor", "drain", "drain"]
    for words in commands:
        assert cli._parser().parse_args(words).run


def test_as_many_ranks_are_waited_for_as_are_started() -> None:
    for command, probe in zip(
        server_commands(),
        (
            container()["startupProbe"]["httpGet"]["path"],
            *settings(EXAMPLES / "systemd" / "eep-server.service", "ExecStartPost"),
        ),
        strict=True,
    ):
        assert f"?ranks={command[command.index('--tp-size') + 1]}" in probe
        assert command[command.index("--tp-size") + 1] == command[command.index("--dp-size") + 1]


def test_there_is_time_to_drain_and_to_end() -> None:
    drains = [float(words[words.index("--within") + 1]) for words in eep_commands() if "--within" in words]
    (sleeps,) = re.findall(r"sleep (\d+)", container()["lifecycle"]["preStop"]["exec"]["command"][-1])
    (stop,) = settings(EXAMPLES / "systemd" / "eep-server.service", "TimeoutStopSec")
    assert drain_limit() < _AFTER_SIGTERM
    assert container()["grace"] > float(sleeps) + drains[0] + _AFTER_SIGTERM
    assert float(stop) > drains[1] + _AFTER_SIGTERM


def test_the_budget_and_the_service_are_for_the_servers() -> None:
    kinds = {each["kind"]: each["spec"] for each in documents()}
    labels = kinds["Deployment"]["template"]["metadata"]["labels"]
    assert kinds["Deployment"]["selector"]["matchLabels"] == labels
    assert kinds["PodDisruptionBudget"]["selector"]["matchLabels"] == labels
    assert kinds["Service"]["selector"] == labels
    assert kinds["PodDisruptionBudget"]["maxUnavailable"] < kinds["Deployment"]["replicas"]


def test_the_evidence_in_the_text_is_evidence() -> None:
    text = " ".join((EXAMPLES / "kubernetes" / "README.md").read_text().split())
    (fields,) = re.findall(r"/eep/evidence -d '\{(.*?)\}'", text)
    assert set(re.findall(r'"(\w+)":', fields)) <= set(Evidence.__struct_fields__)


def test_a_pod_of_one_rank_is_given_what_its_program_takes() -> None:
    (container,) = pods()["workerTemplate"]["spec"]["containers"]
    program = EXAMPLES / "kubernetes" / Path(container["command"][1]).name
    told = subprocess.run([sys.executable, str(program), "--help"], capture_output=True, text=True, check=True).stdout
    given = [word for word in container["command"] if word.startswith("--")]
    probes = [container[probe]["exec"]["command"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    for word in [*given, *probes[0][2:], *probes[1][2:]]:
        assert word.partition("=")[0] in told
    values = dict(word.split("=", 1) for word in given)
    assert int(values["--ranks"]) == pods()["size"]
    assert {f"--directory={values['--directory']}" in probe for probe in probes[:2]} == {True}
    assert cli._parser().parse_args(probes[2][1:]).run
    assert probes[2][-1] == values["--directory"]
    (mount,), (volume,) = container["volumeMounts"], pods()["workerTemplate"]["spec"]["volumes"]
    assert (mount["name"], volume["secret"]["defaultMode"]) == (volume["name"], 0o400)
    assert Path(values["--key-file"]).parent == Path(mount["mountPath"])


def test_the_budget_of_ranks_is_for_their_pods() -> None:
    budget = pod_documents()[1]
    assert budget["kind"] == "PodDisruptionBudget"
    assert budget["spec"]["selector"]["matchLabels"] == pods()["workerTemplate"]["metadata"]["labels"]
    assert budget["spec"]["maxUnavailable"] < pods()["size"]
    readme = (EXAMPLES / "kubernetes" / "README.md").read_text()
    assert f"patch pdb {budget['metadata']['name']} " in readme


def test_no_key_is_on_a_command_line() -> None:
    for command in server_commands():
        assert "--admin-api-key" not in command
        assert command[command.index("--config") + 1].endswith("/key.yaml")


def test_the_key_is_read_from_the_file_that_is_written_for_it(sglang: None, model: Path, tmp_path: Path) -> None:
    (writes,) = settings(EXAMPLES / "systemd" / "eep-server.service", "ExecStartPre")
    file, key = tmp_path / "key.yaml", "0123"  # a number to YAML, if it is not quoted
    _, _, script = shlex.split(writes.replace("/run/eep-server/key.yaml", str(file)))
    script = script.replace("$$", "$")  # as systemd does
    subprocess.run(["/bin/sh", "-c", script], env={"EEP_ADMIN_KEY": key}, check=True)
    assert file.stat().st_mode & 0o077 == 0
    parse = _PARSE.replace(
        "prepare_server_args(sys.argv[1:])", "print(prepare_server_args(sys.argv[1:]).admin_api_key)"
    )
    told = run_python(parse, "--model-path", str(model), "--config", str(file))
    assert told.stdout.splitlines()[-1] == key, told.stderr[-2000:]


def test_a_pod_that_is_started_again_does_not_take_the_others_along() -> None:
    assert pods()["restartPolicy"] == "None"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_are_what_kubernetes_publishes(version: str) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("needs the published schemas: pip install kubernetes-validate")
    validate: Any = importlib.import_module("kubernetes_validate")
    template = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": "pod"},
        "template": pods()["workerTemplate"],
    }
    for each in (*documents(), *pod_documents()[1:], template):
        validate.validate(each, version, strict=True)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_the_units(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze, of Debian's systemd")
    # The programs need not be installed here: only what it says of this file and not of them counts.
    here = tmp_path / unit.name
    here.write_text(re.sub(r"^(Exec[A-Za-z]*)=\S+", r"\1=/bin/true", unit.read_text(), flags=re.MULTILINE))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(here)], capture_output=True, text=True, timeout=60, check=False
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if unit.name in line]
    assert (done.returncode, said) == (0, []), done.stdout + done.stderr
