"""How the processes of a server get into the etcd of ``--eep-store``: as which user, and with which certificates. The flags
name files, so that no secret stands on a command line, which every user of the machine can read."""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from eep.control.private_directory import PrivateDirectory
from eep.control.store.etcd_store import EtcdStore
from eep.control.store.record_seal import RecordSeal
from eep.experts.registry.store_registry import StoreRegistry
from sglang_patches.options import ServerOptions, StoreOptions

logger = logging.getLogger(__name__)
_MOST_PASSWORD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class StoreAccess:
    endpoints: tuple[str, ...]
    user: str | None = None
    password: str | None = None
    tls: ssl.SSLContext | None = None


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


def open_shared(wanted: StoreOptions, key: bytes, instance: str) -> EtcdStore:
    """What the hosts of an instance have in common, sealed with its key. ValueError as in :func:`read_access`."""
    access = read_access(wanted)
    return EtcdStore(
        access.endpoints,
        f"instance-{instance}",
        user=access.user,
        password=access.password,
        tls=access.tls,
        seal=RecordSeal(key),
    )


def open_registry(wanted: ServerOptions, directory: Path) -> StoreRegistry:
    """Where the processes of all hosts tell each other how to be reached, and what they hold. ``directory``: the server's
    own, with the key of the instance in it. The registry has a thread of its own."""
    store, host, key = wanted.store, wanted.host, PrivateDirectory(directory).key()
    if store is None or host is None:
        raise RuntimeError("a server whose ranks are all on its host needs no registry of hosts")
    return StoreRegistry(lambda: open_shared(store, key, host.instance))


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
        read_secret("--eep-store-key", wanted.key)
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
    raw = read_secret("--eep-store-password-file", file)
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


def read_secret(flag: str, file: str) -> bytes:
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
