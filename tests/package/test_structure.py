"""The structure of the code: which part may import which, and that each module and class has a name of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Graph = Mapping[str, Set[str]]

PURE = (
    "eep.membership",
    "eep.experts.placement",
    "eep.experts.repair.repair_plan",
    "eep.experts.balancing.asked_load",
    "eep.experts.balancing.switch_turn",
)
HARMLESS = {
    "__future__",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "numpy",
    "typing",
}
"""What a pure module may import. None of these reads a clock, starts a thread, or reaches a file, a socket or a device."""


def modules(*packages: str) -> dict[str, Path]:
    found = {}
    for package in packages:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules("eep", "sglang_patches")


def imported(path: Path, modules: Set[str]) -> Iterator[str]:
    """Every module that a file names in an import, in functions and for the type checker too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports name their package"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else str(node.module)


def graph_of(modules: Mapping[str, Path]) -> Graph:
    return {name: set(imported(path, modules.keys())) - {name} for name, path in modules.items()}


GRAPH = graph_of(MODULES)


def part_of(name: str) -> str:
    """``eep.control.wire.client`` is part of ``eep.control``."""
    return ".".join(name.split(".")[:2])


def inner(graph: Graph) -> Graph:
    """The imports among the modules of ``graph`` alone."""
    return {name: {each for each in others if each in graph} for name, others in graph.items()}


def circle(graph: Graph) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def reachable(graph: Graph, start: str) -> set[str]:
    seen, left = {start}, [start]
    while left:
        for each in graph.get(left.pop(), ()):
            if each not in seen:
                seen.add(each)
                left.append(each)
    return seen


def test_modules_are_read() -> None:
    assert len(MODULES) > 150
    assert "eep.membership" in GRAPH["eep.control.supervisor.supervisor"]
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})


@pytest.mark.parametrize("package", ["eep", "sglang_patches", "bench"])
def test_no_module_imports_itself_by_way_of_others(package: str) -> None:
    graph = graph_of(modules(package))
    assert len(graph) > 50
    assert circle(inner(graph)) == []


def test_no_part_imports_itself_by_way_of_others() -> None:
    parts: dict[str, set[str]] = {}
    for name, others in inner(GRAPH).items():
        parts.setdefault(part_of(name), set()).update({part_of(each) for each in others} - {part_of(name)})
    assert circle(parts) == []


def test_the_library_does_not_import_the_plugin() -> None:
    for name, others in GRAPH.items():
        if name.split(".")[0] == "eep":
            assert not [each for each in others if each.split(".")[0] in ("sglang_patches", "sglang")], name


@pytest.mark.parametrize("part", PURE)
def test_modules_that_decide_reach_nothing_outside(part: str) -> None:
    of_part = [name for name in MODULES if name == part or name.startswith(part + ".")]
    assert of_part
    for name in set().union(*(reachable(inner(GRAPH), each) for each in of_part)):
        outside = {each.split(".")[0] for each in GRAPH[name] if each not in MODULES}
        assert outside <= HARMLESS, name


def shared(named: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Of pairs of a name and its place, the names that stand in several places."""
    places: dict[str, list[str]] = {}
    for name, place in named:
        places.setdefault(name, []).append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def classes(path: Path) -> list[str]:
    """The classes that a file defines at its top level."""
    return [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]


def test_no_two_modules_have_the_same_name() -> None:
    """Except where the name says the same of both: ``command`` holds the commands of ``eep`` that a part brings."""
    assert shared((path.stem, name) for name, path in MODULES.items() if path.stem not in ("command", "__init__")) == {}


def test_no_two_classes_have_the_same_name() -> None:
    assert "Session" in classes(MODULES["eep.recovery.session"])
    assert shared((each, name) for name, path in MODULES.items() for each in classes(path)) == {}
