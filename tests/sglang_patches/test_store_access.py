"""What the flags of the store name, read from files; and what is wrong with it said in words that name the flag."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from eep.control.store.etcd_gateway import Cause, StoreRefusal
from sglang_patches.options import StoreOptions
from sglang_patches.server import flags
from sglang_patches.server.store_flags import advice
from sglang_patches.store_access import read_access
from tests.control.store.certificates import Authority, why_no_certificates
from tests.sglang_patches.server.arguments import given

PLAIN, SECURE = "http://127.0.0.1:9", "https://127.0.0.1:9"


@pytest.fixture
def password(tmp_path: Path) -> Path:
    file = tmp_path / "password"
    file.write_text("secret\n")
    file.chmod(0o600)
    return file


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"eep_store_user": "me"}, "--eep-store-user: of use only together with --eep-store"),
        ({"eep_store": PLAIN, "eep_store_user": "me"}, "--eep-store-user needs --eep-store-password-file too"),
        ({"eep_store": PLAIN, "eep_store_password_file": "f"}, "--eep-store-password-file needs --eep-store-user too"),
        ({"eep_store": SECURE, "eep_store_cert": "f"}, "--eep-store-cert needs --eep-store-key too"),
        ({"eep_store": SECURE, "eep_store_key": "f"}, "--eep-store-key needs --eep-store-cert too"),
        ({"eep_store": SECURE}, "needs --eep-store-ca: the file with the certificate of the CA"),
        ({"eep_store": PLAIN, "eep_store_ca": "f"}, "--eep-store-ca.* need addresses that all begin with https://"),
        ({"eep_store": f"{SECURE},{PLAIN}", "eep_store_ca": "f"}, "that all begin with https://"),
        (
            {"eep_store": SECURE, "eep_store_ca": "/no/such/file"},
            "--eep-store-ca /no/such/file cannot be read: No such",
        ),
        ({"eep_store": SECURE, "eep_store_ca": "/"}, "--eep-store-ca / cannot be read: Is a directory"),
        ({"eep_store": SECURE, "eep_store_ca": "/dev/null"}, "--eep-store-ca /dev/null holds no certificate"),
        (
            {"eep_store": PLAIN, "eep_store_user": "me", "eep_store_password_file": "/no/such/file"},
            "--eep-store-password-file /no/such/file cannot be read: No such file",
        ),
    ],
)
def test_flags_that_lack_something_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(SystemExit, match=reason):
        flags.parse(given(**changes))


def with_password(file: Path, url: str = PLAIN) -> StoreOptions:
    return StoreOptions(url=url, user="me", password_file=str(file))


def test_the_password_is_the_line_in_its_file(password: Path) -> None:
    access = read_access(with_password(password))
    assert (access.endpoints, access.user, access.password) == ((PLAIN,), "me", "secret")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_password_that_others_can_read_is_refused(password: Path, mode: int) -> None:
    password.chmod(mode)
    with pytest.raises(ValueError, match=rf"can be read by other users \(mode {mode:o}.*chmod 600 {password}"):
        read_access(with_password(password))


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe", b"x" * 5000])
def test_a_file_that_holds_no_password_is_refused(password: Path, content: bytes) -> None:
    password.write_bytes(content)
    with pytest.raises(ValueError, match=r"--eep-store-password-file .*write the password alone into it"):
        read_access(with_password(password))


@pytest.mark.parametrize(("url", "warned"), [(PLAIN, False), ("http://[::1]:9", False), ("http://10.0.0.1:9", True)])
def test_a_password_over_the_network_in_plain_text_is_warned_of(
    password: Path, url: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        read_access(with_password(password, url))
    assert ("plain text; use https://" in caplog.text) == warned


@pytest.mark.skipif(why_no_certificates() is not None, reason=str(why_no_certificates()))
def test_certificates_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    mine, other = authority.sign("mine"), authority.sign("other")
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")
    encrypted.chmod(0o600)

    def access(key: Path) -> Any:
        ca, cert = str(authority.own.certificate), str(mine.certificate)
        return read_access(StoreOptions(url=SECURE, ca=ca, cert=cert, key=str(key)))

    assert access(mine.key).tls is not None
    for key in (other.key, encrypted):
        with pytest.raises(ValueError, match="are no certificate in PEM with its key, not encrypted"):
            access(key)
    mine.key.chmod(0o644)
    with pytest.raises(ValueError, match=r"--eep-store-key .* can be read by other users"):
        access(mine.key)


@pytest.mark.parametrize(
    ("cause", "wanted", "said"),
    [
        ("client-certificate", StoreOptions(url=SECURE), "with --eep-store-cert and --eep-store-key"),
        ("client-certificate", StoreOptions(url=SECURE, cert="mine.pem"), "--eep-store-cert mine.pem must be signed"),
        ("certificate", StoreOptions(url=SECURE), "--eep-store-ca"),
        ("password", StoreOptions(url=SECURE), "give --eep-store-user and --eep-store-password-file"),
        (
            "password",
            StoreOptions(url=SECURE, user="me", password_file="f"),
            "check --eep-store-user me and what f holds",
        ),
        ("no-users", StoreOptions(url=SECURE, user="me"), "leave out --eep-store-user"),
        ("permission", StoreOptions(url=SECURE, user="me"), "let user me read and write"),
    ],
)
def test_each_refusal_says_what_to_change(cause: Cause, wanted: StoreOptions, said: str) -> None:
    assert said in advice(StoreRefusal(cause, "no"), wanted)
