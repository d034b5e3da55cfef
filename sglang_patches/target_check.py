"""The check that SGLang has every name that the plugin hooks.

It reads source files and imports none of them. So it can run before anything else, and on the wheel of a version that is not
installed.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from sglang_patches import sglang_version, targets


def missing(version: str, package: Path) -> list[str]:
    """The targets of ``version`` that the source files in ``package`` (``.../sglang``) do not have."""
    return [f"{targets.full_name(target.name)} ({trouble})" for target, trouble in _troubles(version, package)]


def require_supported() -> None:
    """SystemExit if the installed SGLang lacks a target."""
    try:
        version = sglang_version.installed()
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "--ep-backend eep needs SGLang, which is not installed; "
            f"install a version from {sglang_version.OLDEST} to {sglang_version.NEWEST}"
        ) from None
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    lacking = missing(version, Path(next(iter(spec.submodule_search_locations or ()))))
    if lacking:
        raise SystemExit(
            f"--ep-backend eep cannot run on SGLang {version}: it has no {', no '.join(lacking)}. "
            f"Install a version from {sglang_version.OLDEST} to {sglang_version.NEWEST}."
        )


def _troubles(version: str, package: Path) -> Iterator[tuple[targets.HookTarget, str]]:
    for target in targets.TARGETS:
        if target.is_in(version):
            trouble = _trouble(target, package)
            if trouble:
                yield target, trouble


def _trouble(target: targets.HookTarget, package: Path) -> str | None:
    parts = targets.full_name(target.name).split(".")[1:]
    for length in range(len(parts) - 1, 0, -1):
        base = package.joinpath(*parts[:length])
        file = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
        if file.is_file():
            return _trouble_in(_tree(file), parts[length:], target.parameters)
    return "no such module"


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _trouble_in(tree: ast.AST, names: list[str], parameters: tuple[str, ...]) -> str | None:
    scope: ast.AST = tree
    for name in names:
        found = next((node for node in _statements(scope) if name in _binds(node)), None)
        if found is None:
            return f"no name {name}"
        scope = found
    if parameters and isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        known = {each.arg for each in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)}
        absent = [each for each in parameters if each not in known]
        if absent:
            return f"no parameter {', '.join(absent)}"
    return None


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module or class, those under ``if`` and ``try`` included."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(node)


def _binds(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign):
        return {each.id for each in node.targets if isinstance(each, ast.Name)}
    return {node.target.id} if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else set()
