"""``--eep-store`` and what goes with it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from eep.control.store.etcd_gateway import StoreRefusal
from sglang_patches.options import StoreOptions

_NEEDED = {
    "eep_store_user": "eep_store_password_file",
    "eep_store_password_file": "eep_store_user",
    "eep_store_cert": "eep_store_key",
    "eep_store_key": "eep_store_cert",
}
"""Flags that mean nothing without another."""


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


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
