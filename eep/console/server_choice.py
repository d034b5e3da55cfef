"""Which server a command is for: the only one of this user, that of ``--dir``, or that of ``--url``."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eep.console.api_client import KEY, ApiClient, ApiError, read_url
from eep.console.server_finder import choose_server, find_servers

_DIRECTORY = "EEP_CONTROL_DIR"
_MOST_KEY_BYTES = 4096


def add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir",
        type=Path,
        default=os.environ.get(_DIRECTORY),
        help="the supervisor's private directory (default: $EEP_CONTROL_DIR, or the only server of yours on this host)",
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    """For commands that can also ask over HTTP."""
    add_directory(parser)
    parser.add_argument("--url", help="ask over HTTP instead, as in http://127.0.0.1:30000")
    parser.add_argument("--key-file", type=Path, help=f"a file with the server's admin key (default: ${KEY})")


def directory_of(options: argparse.Namespace) -> Path:
    return Path(options.dir) if options.dir else choose_server(find_servers())


@dataclass(frozen=True)
class ServerChoice:
    """``directory`` is None for a server that is only known by its URL. ``api`` is None for one without HTTP."""

    directory: Path | None
    api: ApiClient | None

    @classmethod
    def of(cls, options: argparse.Namespace) -> ServerChoice:
        key = _key_of(options.key_file)
        if options.url:
            return cls(None, ApiClient(options.url, key))
        directory = directory_of(options)
        url = read_url(directory)
        return cls(directory, ApiClient(url, key) if url else None)

    def status(self) -> dict[str, Any]:
        """Over HTTP, where more is known; from the supervisor if that is not possible."""
        if self.api is not None:
            try:
                found: dict[str, Any] = self.api.get("/eep/status", within=5.0)
                return found
            except (OSError, ApiError):
                if self.directory is None:
                    raise
        from eep.operations.host_status import read_status

        assert self.directory is not None
        return read_status(self.directory)


def _key_of(path: Path | None) -> str:
    if path is None:
        return os.environ.get(KEY, "")
    with path.open() as file:
        return file.read(_MOST_KEY_BYTES).strip()
