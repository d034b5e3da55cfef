"""docs/reference.md names every flag, command, metric, environment variable and refusal that the code has."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eep import cli
from eep.observe.metric_table import METRICS
from sglang_patches.front_end.routes import OWN, REFUSED

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
SERVER = ROOT / "sglang_patches" / "server"


def section(title: str) -> str:
    """What stands below a heading, up to the next one of its depth."""
    depth = len(title) - len(title.lstrip("#"))
    below = REFERENCE.split(f"\n{title}\n")
    assert len(below) == 2, f"docs/reference.md has no heading, or several: {title}"
    return re.split(rf"\n#{{1,{depth}}} ", below[1])[0]


def missing(names: Iterable[str], text: str) -> list[str]:
    """Those names that do not begin a piece of code in the text."""
    known = set(re.findall(r"`([^` =|]+)", text))
    return sorted({name for name in names if name not in known})


def sources(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def strings(node: ast.AST) -> Iterator[str]:
    """Every string in a piece of code, and the fixed parts of those that are put together."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def calls(node: ast.AST, name: str) -> Iterator[ast.Call]:
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == name:
            yield each


def test_every_flag_is_described() -> None:
    added = [
        call.args[0].value
        for module in (
            "flags.py",
            "store_flags.py",
            "host_flags.py",
            "kv_backup.py",
            "anchor_flag.py",
            "balance_flags.py",
            "hardware_flags.py",
            "stall_timeout.py",
            "portion_flag.py",
        )
        for call in ast.walk(ast.parse((SERVER / module).read_text()))
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant)
        if FLAG.fullmatch(str(call.args[0].value))
    ]
    assert len(added) >= 17
    assert missing(map(str, added), section("## Flags")) == []


def test_every_implied_flag_is_described() -> None:
    found = []
    for file in (SERVER / "sglang_flags.py", ROOT / "sglang_patches" / "cuda" / "implied_flags.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Assign | ast.AnnAssign) and "implied" in ast.unparse(node).split("=")[0]:
                keys = node.value.keys if isinstance(node.value, ast.Dict) else [node.targets[0].slice]  # type: ignore[union-attr]
                found += [key.value for key in keys if isinstance(key, ast.Constant)]
    assert len(found) >= 13
    flags = [f"--{str(name).replace('_', '-')}" for name in found]
    assert missing(flags, section("## Flags of SGLang that are implied")) == []


def test_every_refused_flag_is_described() -> None:
    refused = section("## Refused combinations")
    asked = [
        f"--{call.args[0].value.replace('_', '-')}"
        for call in calls(ast.parse((SERVER / "refusals.py").read_text()), "value")
        if isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    ]
    assert len(asked) >= 30
    assert missing(asked, refused) == []
    assert missing(_flags_in_refusals(), REFERENCE) == []


def _flags_in_refusals() -> list[str]:
    """Those that are named where the plugin ends the server, in any of its modules."""
    found = [
        flag
        for _, tree in sources("sglang_patches")
        for call in calls(tree, "SystemExit")
        for text in strings(call)
        for flag in FLAG.findall(text)
        if not text[text.index(flag) + len(flag) :].startswith("-")  # the beginning of one that is put together
    ]
    assert len(found) >= 20
    return found


def test_every_refused_request_is_described() -> None:
    """By its route: those that the guard refuses, and those that are refused whichever way they come."""
    refused = section("## Refused combinations")
    hooked = re.findall(r'"([a-z_]+)", refuse_', (ROOT / "sglang_patches" / "front_end" / "broadcasts.py").read_text())
    assert len(hooked) >= 9
    named = {"check_weights": "/weights_checker"}  # where SGLang calls them otherwise
    assert missing([*REFUSED, *(named.get(name, f"/{name}") for name in hooked)], refused) == []


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """What ``eep`` parses its command line with."""
    taken: list[argparse.ArgumentParser] = []

    def take(self: argparse.ArgumentParser, *_: Any) -> None:
        taken.append(self)
        raise ValueError("this is all that was wanted")

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", take)
    with pytest.raises(ValueError, match="all that was wanted"):
        cli.main([])
    return taken[0]


def commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command by its whole name; not those that only hold others."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield name, parser
    for action in inner:
        for word, below in action.choices.items():
            yield from commands(below, f"{name} {word}")


def test_every_command_and_its_options_are_described(parser: argparse.ArgumentParser) -> None:
    known = dict(commands(parser, "eep"))
    assert len(known) >= 6
    shared = section("## Commands").split("\n### ")[0]
    for name, command in known.items():
        text = section(f"### `{name}`")
        asks_a_server = any(action.dest == "url" for action in command._actions)
        text += shared if asks_a_server else ""
        words = re.findall(r"[\w-]+", text)
        for action in command._actions:
            if action.option_strings and action.dest != "help":
                assert re.search(rf"`[^`]*{action.option_strings[0]}\b", text), f"{name}: {action.option_strings[0]}"
            elif action.choices:
                assert set(map(str, action.choices)) <= set(words), name


def test_every_metric_is_described() -> None:
    shown = [f"{metric.name}_total" if metric.kind == "counter" else metric.name for metric in METRICS.values()]
    described = set(re.findall(r"`(eep_\w+)", section("## Metrics")))
    assert described == set(shown)


def test_every_environment_variable_is_described() -> None:
    read = {
        text
        for _, tree in sources("eep", "sglang_patches", "bench")
        for text in strings(tree)
        if re.fullmatch(r"EEP_[A-Z0-9_]+", text)
    }
    assert len(read) >= 15
    assert missing(read, section("## Environment variables")) == []


def test_nothing_is_described_that_there_is_not() -> None:
    code = "".join(
        path.read_text() for folder in ("eep", "sglang_patches", "bench") for path in (ROOT / folder).rglob("*.py")
    )
    named = set(re.findall(r"`(EEP_[A-Z0-9_]+)`", REFERENCE)) | set(re.findall(r"`(--eep-[a-z-]+)", REFERENCE))
    assert sorted(name for name in named if name not in code) == []


def test_every_route_of_eep_is_described() -> None:
    described = re.findall(r"`(?:GET|POST) (/[^`]*)`", section("## HTTP API"))
    assert sorted(OWN - set(described)) == []
