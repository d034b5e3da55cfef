"""Which server a command is for: the only one of this user, that of ``--dir``, or that of ``--url``."""

from __future__ import annotations

import argparse
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eep.console.api_client import KEY, ApiClient, ApiError
from eep.console.server_files import read_files
from eep.console.server_finder import choose_server, find_servers
from eep.console.server_trust import trust_authority, trust_certificate
from eep.console.told_shapes import StatusShape

_DIRECTORY = "EEP_CONTROL_DIR"
_MOST_KEY_BYTES = 4096
_ANSWERS_WITHIN = 5.0


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
    parser.add_argument("--ca-file", type=Path, help="accept a server's certificate if this CA has signed it")


def directory_of(options: argparse.Namespace) -> Path:
    return Path(options.dir) if options.dir else choose_server(find_servers())


def api_in(directory: Path, key: str = "", authority: ssl.SSLContext | None = None) -> ApiClient | None:
    """The API of the server that a directory is of, asked with its token if no key is given; None if it serves no HTTP."""
    files = read_files(directory)
    if files is None:
        return None
    own = trust_certificate(files.certificate) if files.certificate else None
    return ApiClient(files.url, key or files.token, token=files.token, tls=authority or own)


@dataclass(frozen=True)
class ServerChoice:
    """``directory`` is None for a server that is only known by its URL. ``api`` is None for one without HTTP."""

    directory: Path | None
    api: ApiClient | None

    @classmethod
    def of(cls, options: argparse.Namespace, chosen: Path | None = None) -> ServerChoice:
        """``chosen``: the directory of the server, where that is known already."""
        key = _key_of(options.key_file)
        authority = trust_authority(options.ca_file) if options.ca_file else None
        if options.url:
            return cls(None, ApiClient(options.url, key, tls=authority))
        directory = chosen or directory_of(options)
        return cls(directory, api_in(directory, key, authority))

    @property
    def serves_http(self) -> bool:
        """Whether its API answers. :class:`ApiError`: it does, and refuses."""
        if self.api is None:
            return False
        try:
            self.api.get("/eep/operations", _ANSWERS_WITHIN)
        except OSError:
            return False
        return True

    def status(self) -> dict[str, Any]:
        """Over HTTP, where more is known; from the supervisor if that is not possible."""
        if self.api is not None:
            try:
                found: dict[str, Any] = self.api.get("/eep/status", _ANSWERS_WITHIN, StatusShape)
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
    try:
        with path.open() as file:
            return file.read(_MOST_KEY_BYTES).strip()
    except OSError as error:
        raise ValueError(f"--key-file {path} cannot be read: {error.strerror}") from None
