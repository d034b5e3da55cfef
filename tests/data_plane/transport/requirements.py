"""What tests between hosts need."""

from __future__ import annotations

from eep.abi import native
from eep.abi.link import NativeTransport
from eep.errors import EepError


def why_no_links(backend: str = "cpu") -> str | None:
    """Why there can be no links here, or None."""
    try:
        NativeTransport(native.load(backend), "tcp", "127.0.0.1").close()
    except (EepError, OSError) as error:
        return str(error)
    return None
