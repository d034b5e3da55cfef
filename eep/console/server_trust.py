"""Which certificate of a server a caller accepts."""

from __future__ import annotations

import ssl
from pathlib import Path


def trust_authority(ca_file: Path) -> ssl.SSLContext:
    """Those that a CA has signed for the name in the URL."""
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except ssl.SSLError as error:
        raise ValueError(f"--ca-file {ca_file} holds no certificate: {error.reason}") from None
    except OSError as error:
        raise ValueError(f"--ca-file {ca_file} cannot be read: {error.strerror}") from None


def trust_certificate(certificate: str) -> ssl.SSLContext:
    """This one alone. The name that it is for does not matter: no other server has its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # others may vouch for it, who are not asked
    try:
        context.load_verify_locations(cadata=certificate)
    except ssl.SSLError as error:
        raise ValueError(f"the server's certificate cannot be read: {error.reason}; give --url and --ca-file") from None
    return context
