"""The texts by which the sources say that something is wrong, found in their syntax trees.

Nothing that is raised goes by unseen: each class of errors is in one of the lists below, or the test of this module fails.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOR_OTHERS = ("drill", "compat", "entry_point.py")
"""Programs for tests and for authors of programs; no operator of a server meets them."""
SHORTEST = 9
"""A text with fewer fixed characters passes on another one."""
LOGGED = ("logger.warning", "logger.error", "logger.exception")
SAID = {"refusal": 1, "OrdersFailed": 0, "turn.fence": 1, "turn.revoke": 0, "self.revoke": 0}
"""Which argument of a call is a text that an operator reads."""
EVENTS = ("log", "note", "_note", "_tell", "_say", "write", "fence", "Transition")
"""Calls that write a line of the event log: its kind, and then its cause."""
REASONS = re.compile(r"_?why_\w+|_why|_refusal")
"""Functions that give the reason for something: readiness, refusals, the end of a server."""
NAMED_TEXTS = ("unknown",)
"""Arguments with a name that are such a reason."""

BY_TEXT = (
    *(
        "SystemExit",
        "argparse.ArgumentTypeError",
        "HTTPException",
        "ApiError",
        "NoServer",
        "SupervisorGone",
        "StoreError",
    ),
    *("StoreRefusal", "BadOperation", "OperationConflict", "TooManyOperations", "OrderRefused", "BadEvidence"),
    *("BadQuery", "EvidenceConflict"),
    *("UnknownHardware", "BadReactions", "NvmlMissing", "EepError", "PeerUnreachable", "RankInUse", "RankRemoved"),
    *("StepFailed", "EpochRevoked", "AnchorGone", "NotPrivate", "RepairFailed", "BackupTooLarge"),
)
"""Errors whose every text has an entry."""
BY_NAME = (
    *("ContractBroken", "CoverageError", "SourceLost", "TransferFailed", "BadRecord", "BadLinkRecord", "RecordError"),
    *(
        "WireError",
        "HttpError",
        "CertificateError",
        "LeaseEndedError",
        "ForkServerGone",
        "Refused",
        "NoRestore",
        "Unfit",
    ),
    "UnwritableValue",
)
"""Errors that are met as the rest of another text: the class has one entry for all its texts."""
OF_PYTHON = (
    *(
        "ValueError",
        "TypeError",
        "AttributeError",
        "AssertionError",
        "KeyError",
        "IndexError",
        "RuntimeError",
        "OSError",
    ),
    *("ConnectionError", "TimeoutError", "FileNotFoundError", "FileExistsError"),
)
"""Wrong arguments of a program, and what the system says. The texts of those that a command prints are in COMMANDS."""
COMMANDS = ("console", "command.py", "cli.py")
"""Where an error of Python is a text on an operator's terminal."""
MAKERS = (
    *(
        "_ERRORS.get(code, EepError)",
        "EpochRevoked if self.revoked else StepFailed",
        "_late",
        "_like(error)",
        "overtaken",
    ),
    *("self._failed", "self._failure", "self._no_answer"),
)
"""What is raised and no class: it gives an error that it makes itself, or one from elsewhere."""


def _parts(path: Path) -> set[str]:
    return set(path.relative_to(ROOT).parts)


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [
        (path, ast.parse(path.read_text()))
        for folder in ("eep", "sglang_patches")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not _parts(path) & set(FOR_OTHERS)
    ]


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def fixed_text(node: ast.expr) -> str:
    """What is always there of a text that is put together, with … for the rest."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[-+.0-9]*[sdgrf]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(fixed_text(each) if isinstance(each, ast.Constant) else "…" for each in node.values)
    if isinstance(node, ast.BinOp):
        return fixed_text(node.left) + fixed_text(node.right)
    return "…"


def alternatives(node: ast.expr, assigned: dict[str, list[ast.expr]]) -> set[str]:
    """The texts that an expression may be. ``assigned``: what the names of its function may stand for."""
    if isinstance(node, ast.IfExp):
        return alternatives(node.body, assigned) | alternatives(node.orelse, assigned)
    if isinstance(node, ast.BoolOp):
        return set().union(*(alternatives(each, assigned) for each in node.values))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return {re.sub(r"\{\w*\}", "…", text) for text in alternatives(node.func.value, assigned)}
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    if isinstance(node, ast.Name) and name in assigned:
        others = {each: values for each, values in assigned.items() if each != name}
        return set().union(*(alternatives(each, others) for each in assigned[name]))
    return constants().get(name) or {fixed_text(node)}


@cache
def constants() -> dict[str, set[str]]:
    """The texts that have a name in capitals in any module."""
    found: dict[str, set[str]] = {}
    for _, tree in trees():
        for node in tree.body:
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if isinstance(node, ast.Assign) and isinstance(target, ast.Name) and target.id.isupper():
                    found.setdefault(target.id, set()).add(fixed_text(node.value))
    return found


def assignments(scope: ast.AST) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
    return found


@cache
def classes() -> dict[str, str]:
    """Each exception of the sources, and where it is defined."""
    bases = {
        node.name: ({ast.unparse(base) for base in node.bases}, str(path.relative_to(ROOT)))
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    known = {"Exception", "BaseException", *OF_PYTHON}
    while more := {name for name, (above, _) in bases.items() if above & known} - known:
        known |= more
    return {name: bases[name][1] for name in known & bases.keys()}


@cache
def raised() -> set[str]:
    """Whatever is called to make what is raised."""
    return {
        ast.unparse(node.exc.func)
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }


def length(text: str) -> int:
    """Of what says anything. The name of a flag alone says nothing."""
    return len(re.sub(r"--[a-z-]+( eep\b)?", "", text).replace("…", "").strip(" :;=."))


@cache
def texts() -> set[str]:
    """All that a page must explain, but for events."""
    found: set[str] = set()
    for path, tree in trees():
        is_command = bool(_parts(path) & set(COMMANDS))
        for scope in functions(tree):
            assigned = assignments(scope)
            for node in _read(scope, is_command):
                found |= alternatives(node, assigned)
    return {text for text in found if " " in text and length(text) >= SHORTEST}


def _read(scope: ast.AST, is_command: bool) -> Iterator[ast.expr]:
    """What is read of the calls and answers in a function."""
    gives_reasons = isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) and REASONS.fullmatch(scope.name)
    for node in ast.walk(scope):
        if isinstance(node, ast.Return) and node.value is not None and gives_reasons:
            yield node.value
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in BY_TEXT or (is_command and name in OF_PYTHON):
            yield from node.args
            yield from (each.value for each in node.keywords)
        elif name in LOGGED:
            yield node.args[0]
        elif name in SAID and len(node.args) > SAID[name]:
            yield node.args[SAID[name]]
        yield from (each.value for each in node.keywords if each.arg in NAMED_TEXTS)


@cache
def events() -> set[tuple[str, str]]:
    """The kinds of lines of the event log, with the causes that are fixed texts."""
    found = set()
    for _, tree in trees():
        for scope in functions(tree):
            assigned = assignments(scope)
            for node in ast.walk(scope):
                if not isinstance(node, ast.Call) or ast.unparse(node.func).split(".")[-1] not in EVENTS:
                    continue
                for kind, cause in zip(node.args, node.args[1:], strict=False):
                    if re.fullmatch(r"[A-Z][A-Z-]{2,}", fixed_text(kind)):
                        found |= {(fixed_text(kind), text) for text in alternatives(cause, assigned)}
    return found
