"""How this server gets into the etcd of ``--eep-store``: as which user, and with which certificates. The flags name files,
so that no secret stands on a command line, which every user of the machine can read."""

from __future__ import annotations

import argparse
import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eep.control.store.etcd_gateway import StoreRefusal
from sglang_patches.options import StoreOptions

logger = logging.getLogger(__name__)
_MOST_PASSWORD_BYTES = 4096
_NEEDED = {
    "eep_store_user": "eep_store_password_file",
    "eep_store_password_file": "eep_store_user",
    "eep_store_cert": "eep_store_key",
    "eep_store_key": "eep_store_cert",
}
"""Flags that mean nothing without another."""


@dataclass(frozen=True, slots=True)
class StoreAccess:
    endpoints: tuple[str, ...]
    user: str | None = None
    password: str | None = None
    tls: ssl.SSLContext | None = None


def add_store_flags(add: Callable[..., Any]) -> None:
    """``add`` is ``add_argument`` of a parser."""
    add(
        "--eep-store",
        metavar="URL",
        default=None,
        help="The etcd that keeps the views of the supervisor, e.g. https://host:2379, with commas between its nodes "
        "(default: a store inside this server).",
    )
    add("--eep-store-user", metavar="NAME", default=None, help="The user of etcd (default: none).")
    add(
        "--eep-store-password-file",
        metavar="FILE",
        default=None,
        help="The file with the password of that user. No other user of this machine may be able to read it.",
    )
    add(
        "--eep-store-ca",
        metavar="FILE",
        default=None,
        help="The CA certificates that etcd's certificate is checked with, as PEM. An https:// address needs them.",
    )
    add(
        "--eep-store-cert",
        metavar="FILE",
        default=None,
        help="The certificate of this server, as PEM, for an etcd that asks its clients for one (default: none).",
    )
    add("--eep-store-key", metavar="FILE", default=None, help="The private key of --eep-store-cert, as PEM.")


def parse_store(arguments: argparse.Namespace) -> StoreOptions | None:
    """What the flags say of a store; None if they name none. SystemExit if one of them lacks another."""
    given = [name for name in (*_NEEDED, "eep_store_ca") if getattr(arguments, name) is not None]
    if arguments.eep_store is None:
        if given:
            raise SystemExit(f"{', '.join(map(_flag, given))}: of use only together with --eep-store; add it")
        return None
    for name in given:
        if name in _NEEDED and getattr(arguments, _NEEDED[name]) is None:
            raise SystemExit(f"{_flag(name)} needs {_flag(_NEEDED[name])} too; add it, or leave out both")
    return StoreOptions(
        url=arguments.eep_store,
        user=arguments.eep_store_user,
        password_file=arguments.eep_store_password_file,
        ca=arguments.eep_store_ca,
        cert=arguments.eep_store_cert,
        key=arguments.eep_store_key,
    )


def read_access(wanted: StoreOptions) -> StoreAccess:
    """ValueError if an address or a file is not as it should be."""
    endpoints = parse_endpoints(wanted.url)
    secure = {urlsplit(each).scheme for each in endpoints} == {"https"}
    if not secure and (wanted.ca or wanted.cert):
        raise ValueError(
            "--eep-store-ca, --eep-store-cert and --eep-store-key need addresses that all begin with https://"
        )
    if wanted.user is None:
        return StoreAccess(endpoints, tls=_tls(wanted) if secure else None)
    if not secure and not all(map(_is_loopback, endpoints)):
        logger.warning("--eep-store-user: the password goes over the network in plain text; use https:// addresses")
    assert wanted.password_file is not None
    return StoreAccess(endpoints, wanted.user, _password(wanted.password_file), _tls(wanted) if secure else None)


def parse_endpoints(url: str) -> tuple[str, ...]:
    """The nodes that ``url`` names, with commas between them. ValueError if one is not named as it should be."""
    found = tuple(each.strip() for each in url.split(","))
    for each in found:
        parts = urlsplit(each)
        if parts.username is not None:
            raise ValueError(
                "the address of etcd must not hold a user and password, which every user of this machine could read; give "
                "--eep-store-user and --eep-store-password-file"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ValueError(f"a node of etcd is named like http://127.0.0.1:2379, not {each!r}")
        _ = parts.port  # ValueError if it is no number
    return found


def advice(refusal: StoreRefusal, wanted: StoreOptions) -> str:
    """What to change about the flags after a refusal."""
    match refusal.cause:
        case "certificate":
            return (
                "give the certificate of the CA that signed it with --eep-store-ca, and a name that it has in the URL"
            )
        case "client-certificate" if wanted.cert is None:
            return "give a certificate that etcd trusts with --eep-store-cert and --eep-store-key"
        case "client-certificate":
            return f"--eep-store-cert {wanted.cert} must be signed by a CA that etcd trusts, and must not have run out"
        case "password" if wanted.user is None:
            return "give --eep-store-user and --eep-store-password-file"
        case "password":
            return f"check --eep-store-user {wanted.user} and what {wanted.password_file} holds"
        case "no-users":
            return "leave out --eep-store-user and --eep-store-password-file, or turn authentication on in etcd"
        case "permission":
            return f"have etcd let user {wanted.user} read and write the keys that begin with /eep/"


def _tls(wanted: StoreOptions) -> ssl.SSLContext:
    if wanted.ca is None:
        raise ValueError(
            "an https:// address needs --eep-store-ca: the file with the certificate of the CA that signed etcd's, or with "
            "those of all CAs that this machine trusts, such as /etc/ssl/certs/ca-certificates.crt"
        )
    _read("--eep-store-ca", wanted.ca)
    try:
        context = ssl.create_default_context(cafile=wanted.ca)
    except ssl.SSLError as error:
        raise ValueError(f"--eep-store-ca {wanted.ca} holds no certificate in PEM: {error.reason or error}") from None
    if wanted.cert is not None and wanted.key is not None:
        _read("--eep-store-cert", wanted.cert)
        _read_secret("--eep-store-key", wanted.key)
        try:
            # An empty password: without one, a key that is encrypted would be asked for on the terminal.
            context.load_cert_chain(wanted.cert, wanted.key, password="")
        except ssl.SSLError as error:
            raise ValueError(
                f"--eep-store-cert {wanted.cert} and --eep-store-key {wanted.key} are no certificate in PEM with its key, "
                f"not encrypted: {error.reason or error}"
            ) from None
    return context


def _password(file: str) -> str:
    raw = _read_secret("--eep-store-password-file", file)
    try:
        password = raw.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise ValueError(f"--eep-store-password-file {file} holds no text; write the password alone into it") from None
    if not password or len(raw) > _MOST_PASSWORD_BYTES:
        raise ValueError(
            f"--eep-store-password-file {file} has {len(raw)} bytes; write the password alone into it, of at most "
            f"{_MOST_PASSWORD_BYTES} bytes"
        )
    return password


def _read_secret(flag: str, file: str) -> bytes:
    """ValueError if another user of the machine could read it, or could have written it."""
    raw = _read(flag, file)
    found = Path(file).stat()
    if found.st_mode & 0o077 or found.st_uid not in (os.geteuid(), 0):
        raise ValueError(
            f"{flag} {file} can be read by other users (mode {found.st_mode & 0o777:03o}, owner {found.st_uid}): run "
            f"'chmod 600 {file}' as the user of this server, who must own it"
        )
    return raw


def _read(flag: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(f"{flag} {file} cannot be read: {why}; name a file that this user can read") from None


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
