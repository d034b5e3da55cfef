"""Makes this tree look installed, where nothing may be: ``python tests/gpu/in_tree.py DIR``, then DIR on PYTHONPATH.

SGLang and torch find plugins by the metadata of installed packages; this writes just that, from pyproject.toml.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def write_metadata(directory: Path) -> Path:
    """The metadata of this package, in ``directory``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    place = directory / f"{project['name']}-{project['version']}.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    (place / "entry_points.txt").write_text("\n".join(lines))
    return place


if __name__ == "__main__":
    print(write_metadata(Path(sys.argv[1])))
