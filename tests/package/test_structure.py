"""Which part may import which: no circles, nothing from the library to the plugin, and a pure core."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Graph = Mapping[str, Set[str]]

PURE = ("eep.membership", "eep.experts.placement", "eep.experts.repair.repair_plan")
HARMLESS = {
    "__future__",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "itertools",
    "math",
    "numpy",
    "typing",
}
"""What a pure module may import: nothing that reads a clock, starts a thread, or reaches a file, a socket or a device."""


def modules() -> dict[str, Path]:
    found = {}
    for package in ("eep", "sglang_patches"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, in functions and for the type checker too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports name their package"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else str(node.module)


GRAPH: Graph = {name: set(imported(path)) - {name} for name, path in MODULES.items()}


def part_of(name: str) -> str:
    """``eep.control.wire.client`` is of ``eep.control``."""
    return ".".join(name.split(".")[:2])


def inner(graph: Graph) -> Graph:
    """Of what is imported, our own."""
    return {name: {each for each in others if each in MODULES} for name, others in graph.items()}


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


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circle(inner(GRAPH)) == []


def test_no_part_imports_itself_by_way_of_others() -> None:
    parts: dict[str, set[str]] = {}
    for name, others in inner(GRAPH).items():
        parts.setdefault(part_of(name), set()).update({part_of(each) for each in others} - {part_of(name)})
    assert circle(parts) == []


def test_the_library_knows_nothing_of_the_plugin() -> None:
    for name, others in GRAPH.items():
        if name.split(".")[0] == "eep":
            assert not [each for each in others if each.split(".")[0] in ("sglang_patches", "sglang")], name


@pytest.mark.parametrize("part", PURE)
def test_what_decides_talks_to_nobody(part: str) -> None:
    of_part = [name for name in MODULES if name == part or name.startswith(part + ".")]
    assert of_part
    for name in set().union(*(reachable(inner(GRAPH), each) for each in of_part)):
        outside = {each.split(".")[0] for each in GRAPH[name] if each not in MODULES}
        assert outside <= HARMLESS, name


def test_a_name_means_one_thing() -> None:
    """Two modules of one name are allowed only where the name says the same of both."""
    same = {"command", "__init__"}  # the commands of ``eep`` that a part brings along
    seen: dict[str, str] = {}
    for name, path in MODULES.items():
        if path.stem not in same:
            assert path.stem not in seen, f"{name} and {seen[path.stem]}"
            seen[path.stem] = name
