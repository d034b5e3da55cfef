"""What a server leaves for callers on its host, and how they use it: its URL, a token, and its own certificate."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from eep import cli
from eep.access import NotPrivate
from eep.console.server_choice import ServerChoice
from eep.console.server_files import read_files, write_files
from tests.console.server_stand_in import Routes, serving
from tests.control.store.certificates import Authority, Certificate, why_no_certificates

needs_openssl = pytest.mark.skipif(why_no_certificates() is not None, reason=str(why_no_certificates()))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "d").mkdir(mode=0o700)
    return tmp_path / "d"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca") / "ca")


@pytest.fixture(scope="module")
def named_otherwise(authority: Authority) -> Certificate:
    """As servers have them: it names the host, and not the address at which the host itself asks."""
    return authority.sign("server", alternative="DNS:model.example")


@pytest.fixture
def port(url: str, named_otherwise: Certificate) -> Iterator[int]:
    """Of a server with TLS. It is known to ``url`` too, whose fixture clears what was asked."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(named_otherwise.certificate, named_otherwise.key)
    with serving(tls=tls) as server:
        yield server.server_port


def test_a_server_says_where_it_is_and_gives_a_token_to_its_own_user(place: Path) -> None:
    assert read_files(place) is None
    token = write_files(place, "http://127.0.0.1:30000", None)
    found = read_files(place)
    assert found is not None
    assert (found.url, found.token, found.certificate) == ("http://127.0.0.1:30000", token, None)
    assert len(token) == 64
    assert (place / "token").stat().st_mode & 0o077 == 0


def test_a_directory_that_others_can_enter_is_not_believed(place: Path) -> None:
    write_files(place, "http://127.0.0.1:30000", None)
    place.chmod(0o755)
    with pytest.raises(NotPrivate):
        read_files(place)


def test_where_there_is_no_room_no_caller_has_a_token(tmp_path: Path) -> None:
    assert write_files(tmp_path / "none", "http://127.0.0.1:30000", None) == ""


def test_the_token_goes_to_the_server_of_the_directory_alone(url: str, place: Path) -> None:
    token = write_files(place, url, None)
    assert cli.main(["drain", "--dir", str(place)]) == 0
    assert cli.main(["drain", "--url", url]) == 0
    assert Routes.tokens[-2:] == [token, None] or Routes.tokens[-4:] == [token, token, None, None]


@needs_openssl
def test_the_servers_own_certificate_is_trusted_whatever_its_name(
    port: int, named_otherwise: Certificate, authority: Authority, place: Path, tmp_path: Path
) -> None:
    # Files of servers have those that vouch for it too.
    chain = tmp_path / "chain.pem"
    chain.write_text(named_otherwise.certificate.read_text() + authority.own.certificate.read_text())
    write_files(place, f"https://127.0.0.1:{port}", chain)
    assert cli.main(["drain", "--dir", str(place)]) == 0


@needs_openssl
def test_another_certificate_of_the_same_ca_is_not_trusted(
    port: int, authority: Authority, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = tmp_path / "chain.pem"
    chain.write_text(authority.sign("other").certificate.read_text() + authority.own.certificate.read_text())
    write_files(place, f"https://127.0.0.1:{port}", chain)
    assert cli.main(["drain", "--dir", str(place)]) == 1
    assert "certificate is not trusted" in capsys.readouterr().err
    assert Routes.asked == []


@needs_openssl
def test_a_server_elsewhere_is_trusted_by_the_ca_that_is_named(
    url: str, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    signed = authority.sign("elsewhere")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(signed.certificate, signed.key)
    with serving(tls=tls) as server:
        asks = ["status", "--url", f"https://127.0.0.1:{server.server_port}"]
        assert cli.main(asks) == 1
        assert "--ca-file" in capsys.readouterr().err
        assert cli.main([*asks, "--ca-file", str(authority.own.certificate)]) == 0


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_ca_that_is_none_is_an_error_that_names_the_file(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    options = cli._parser().parse_args(["status", "--url", "https://h", "--ca-file", str(file)])
    with pytest.raises(ValueError, match=f"--ca-file {file}"):
        ServerChoice.of(options)
