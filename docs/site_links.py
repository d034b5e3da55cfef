"""A hook of mkdocs: the site also holds pages that lie outside of docs/, and links between the two stay as they are on disk.

A page is written so that its links work where it lies in the repository. The site has ``docs/`` as its root, so each link is
written anew, from where its page is in the site to where its target is.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = ("CONTRIBUTING.md", *(f"bench/results/*.{kind}" for kind in ("md", "png", "json")))
_LINK = re.compile(r"(\]\()([^)#\s:]+)([)#])")


def on_files(files: Files, config: Any) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = page.file.src_uri
    lies_in = posixpath.dirname(here if _is_outside(page.file) else f"docs/{here}")

    def rewritten(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(lies_in, link[2]))
        return f"{link[1]}{posixpath.relpath(target.removeprefix('docs/'), posixpath.dirname(here) or '.')}{link[3]}"

    return _LINK.sub(rewritten, markdown)


def _is_outside(file: File) -> bool:
    return Path(file.abs_src_path or "") == ROOT / file.src_uri
