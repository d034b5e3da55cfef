"""The numbers of the C headers, read from their text: what a mirror in Python is compared with."""

from __future__ import annotations

import pathlib
import re

_INCLUDE = pathlib.Path(__file__).parents[2] / "eep_cuda/include/eep"


def _text() -> str:
    """All headers, without their comments."""
    text = "\n".join(
        (_INCLUDE / f"{name}.h").read_text() for name in ("rank_set", "peer_table", "protocol", "eep", "hosts")
    )
    return re.sub(r"//[^\n]*", "", text)


def constants() -> dict[str, int]:
    """Every ``#define EEP_NAME number``, by NAME."""
    return {name: int(value) for name, value in re.findall(r"#define EEP_(\w+) (\d+)\s*$", _text(), re.MULTILINE)}


def enumerations() -> dict[str, dict[str, int]]:
    """Every ``typedef enum { ... } name``, by name: its members without ``EEP_``, and their numbers."""
    found = {}
    for body, name in re.findall(r"typedef enum \{([^}]*)\} (\w+);", _text()):
        members: dict[str, int] = {}
        following = 0
        for member in filter(None, map(str.strip, body.split(","))):
            key, _, value = member.partition("=")
            following = int(value) if value else following
            members[key.strip().removeprefix("EEP_")] = following
            following += 1
        found[name] = members
    return found


def functions() -> dict[str, int]:
    """Every exported function, and how many arguments it takes."""
    found = {}
    for name, arguments in re.findall(r"EEP_API [^;{]*?\b(eep_\w+)\((.*?)\);", _text(), re.DOTALL):
        # A pointer to a function is one argument, whatever it takes itself.
        flat = re.sub(r"\(\*\w+\)\([^()]*\)", "*", arguments)
        found[name] = 0 if flat.strip() == "void" else flat.count(",") + 1
    return found
