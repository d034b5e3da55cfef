"""Certificates for tests: a CA, and what it has signed."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


def why_no_certificates() -> str | None:
    return None if shutil.which("openssl") else "openssl is not installed"


@dataclass(frozen=True, slots=True)
class Certificate:
    certificate: Path
    key: Path


class Authority:
    """A CA in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self.own = Certificate(directory / "ca.pem", directory / "ca.key")
        _openssl(
            *("req", "-x509", *_NEW_KEY, "-nodes", "-days", "2", "-subj", "/CN=test CA"),
            *("-keyout", self.own.key, "-out", self.own.certificate),
        )

    def sign(self, name: str, *, alternative: str = "IP:127.0.0.1") -> Certificate:
        request, extensions = self._directory / f"{name}.csr", self._directory / f"{name}.ext"
        made = Certificate(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        _openssl("req", *_NEW_KEY, "-nodes", "-subj", f"/CN={name}", "-keyout", made.key, "-out", request)
        extensions.write_text(f"subjectAltName={alternative}\n")
        _openssl(
            *("x509", "-req", "-in", request, "-days", "2", "-CA", self.own.certificate, "-CAkey", self.own.key),
            *("-CAcreateserial", "-extfile", extensions, "-out", made.certificate),
        )
        made.key.chmod(0o600)
        return made

    def trusted(self, client: Certificate | None = None) -> ssl.SSLContext:
        """What a client of a server that this CA vouches for uses."""
        context = ssl.create_default_context(cafile=str(self.own.certificate))
        if client is not None:
            context.load_cert_chain(client.certificate, client.key)
        return context


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
