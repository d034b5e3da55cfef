"""What a server leaves in its private directory for callers on its host: where it serves HTTP, a token, its certificate.

The directory can be entered by the server's user alone. So whoever knows the token may change the server, and whoever has the
certificate knows that it is the server's, whatever name it is for.
"""

from __future__ import annotations

import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from eep.access import check_private

TOKEN_HEADER = "X-EEP-Token"
_URL, _TOKEN, _CERTIFICATE = "url", "token", "certificate.pem"
_MOST_CHARACTERS = 1 << 16
_FIRST_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """``certificate``: that of the server alone, without those that vouch for it; None for one without TLS."""

    url: str
    token: str
    certificate: str | None


def write_files(directory: Path, url: str, certificate: Path | None) -> str:
    """The token. It is empty, and no caller has it, where there is no room for the files."""
    token = secrets.token_hex(32)
    try:
        (directory / _TOKEN).touch(mode=0o600)
        (directory / _TOKEN).write_text(token)
        (directory / _URL).write_text(f"{url}\n")
    except OSError:
        return ""
    if certificate is not None:
        # A link, since a server may be told to read its certificate again when that was renewed.
        with suppress(OSError):
            (directory / _CERTIFICATE).symlink_to(certificate.resolve())
    return token


def read_files(directory: Path) -> ServerFiles | None:
    """None for a server that does not say where it serves HTTP."""
    check_private(directory)
    url = _read(directory / _URL)
    if not url:
        return None
    found = _FIRST_CERTIFICATE.search(_read(directory / _CERTIFICATE))
    return ServerFiles(url, _read(directory / _TOKEN), found.group() if found else None)


def _read(path: Path) -> str:
    try:
        with path.open() as file:
            return file.read(_MOST_CHARACTERS).strip()
    except OSError:
        return ""
