"""Who may change an instance by HTTP where the server has no key. Pure.

With a key, SGLang has checked it before. Without one, SGLang serves its admin routes to everyone who reaches the port. EEP's
changing routes go to callers on this host alone, and to no page of another site in a browser on this host. Whoever has the
token in the server's private directory is the server's user on this host, whatever address the server listens at, and
whatever key it wants.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from eep.console.server_files import TOKEN_HEADER

_WITHOUT_KEY = "this server has no --admin-api-key, so it takes changes"
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")


def opens(authorization: str | None, token: str) -> bool:
    """Whether a caller gives the token in place of the server's key."""
    scheme, _, given = (authorization or "").partition(" ")
    return scheme.lower() == "bearer" and _is_same(given, token)


def why_not_trusted(client: str | None, headers: Mapping[str, str], *, has_key: bool, token: str = "") -> str | None:
    """Why a change is refused; None if it is not. ``client``: the address of the other end. ``headers``: in lower case.
    ``token``: the one in the private directory; empty if there is none."""
    if has_key or _is_same(headers.get(TOKEN_HEADER.lower(), ""), token):
        return None
    if client is None or not _is_loopback(client):
        return f"{_WITHOUT_KEY} from its own host only; start it with --admin-api-key"
    if any(name in headers for name in _FORWARDED):
        return f"{_WITHOUT_KEY} from its own host only, and a proxy has passed this on; start it with --admin-api-key"
    host = headers.get("host", "")
    if not _is_loopback(_name_in(host)):
        return f"{_WITHOUT_KEY} under the name localhost only, not {host!r}; start it with --admin-api-key"
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        return f"{_WITHOUT_KEY} from its own page only, not from one of {origin!r}; start it with --admin-api-key"
    return None


def _is_same(given: str, token: str) -> bool:
    return bool(token) and hmac.compare_digest(given.encode(), token.encode())


def _name_in(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)
