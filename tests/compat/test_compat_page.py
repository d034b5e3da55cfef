"""docs/compat.md names every call of the interfaces of other libraries, and no call that there is not."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from eep.compat import deep_ep, nixl_ep

PAGE = Path(__file__).parents[2] / "docs" / "compat.md"
ABSENT = {"engram_*", "pp_*", "agrs_*", "all_gather", "ht_*"}
INHERITED = {"send_again", "meet_in_normal_mode", "num_sms"}
"""What one face has for another, and a number that is named by its setter."""


def tables() -> dict[str, set[str]]:
    """The names in the first column of each table, by heading."""
    found: dict[str, set[str]] = {}
    heading = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("|"):
            _, call, here, *_ = line.split("|")
            names = re.findall(r"`([\w*]+)", call if call.strip() != "not in DeepEP" else here)
            found.setdefault(heading, set()).update(names)
    return found


def calls(face: type) -> set[str]:
    return {name for name in dir(face) if not name.startswith("_")} - INHERITED


@pytest.mark.parametrize(
    ("heading", "face", "module"),
    [
        ("DeepEP: `Buffer`", deep_ep.Buffer, deep_ep),
        ("DeepEP: `ElasticBuffer` and `EPHandle`", deep_ep.ElasticBuffer, deep_ep),
        ("NIXL: `Buffer`", nixl_ep.Buffer, nixl_ep),
    ],
)
def test_the_table_of(heading: str, face: type, module: object) -> None:
    named = tables()[heading]
    assert calls(face) - named == set()
    there = calls(face) | set(module.__all__) | {"enable_shrink"}  # type: ignore[attr-defined]
    assert named - there - ABSENT == set()
    assert not [name for name in calls(face) for absent in named & ABSENT if fnmatch(name, absent)]
