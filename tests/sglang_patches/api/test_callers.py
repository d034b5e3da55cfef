from __future__ import annotations

import pytest

from sglang_patches.api.callers import opens, why_not_trusted

LOCAL = {"host": "127.0.0.1:30000"}


@pytest.mark.parametrize("client", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("host", ["localhost", "localhost:30000", "127.0.0.1:30000", "[::1]:30000"])
def test_a_caller_on_this_host_is_trusted_without_a_key(client: str, host: str) -> None:
    assert why_not_trusted(client, {"host": host}, has_key=False) is None


@pytest.mark.parametrize("client", [None, "10.0.0.7", "192.168.1.1", "::ffff:10.0.0.7", "fe80::1", "", "testclient"])
def test_a_caller_elsewhere_is_not(client: str | None) -> None:
    assert "--admin-api-key" in str(why_not_trusted(client, LOCAL, has_key=False))


@pytest.mark.parametrize(
    "headers",
    [
        {**LOCAL, "x-forwarded-for": "10.0.0.7"},
        {**LOCAL, "forwarded": "for=10.0.0.7"},
        {"host": "evil.example:30000"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "["},
        {},
        {**LOCAL, "origin": "https://evil.example"},
        {**LOCAL, "origin": "http://127.0.0.1:8080"},
        {**LOCAL, "origin": "null"},
    ],
)
def test_a_proxy_a_foreign_name_and_a_foreign_page_are_not(headers: dict[str, str]) -> None:
    assert why_not_trusted("127.0.0.1", headers, has_key=False) is not None
    assert why_not_trusted("127.0.0.1", headers, has_key=True) is None, "SGLang has checked the key"


def test_the_page_of_the_server_itself_is_trusted() -> None:
    assert why_not_trusted("127.0.0.1", {**LOCAL, "origin": "http://127.0.0.1:30000"}, has_key=False) is None


def test_who_has_the_token_of_the_private_directory_is_trusted_wherever_the_server_listens() -> None:
    asked = {"host": "10.0.0.7:30000", "x-eep-token": "a" * 64}
    assert why_not_trusted("10.0.0.7", asked, has_key=False, token="a" * 64) is None
    assert why_not_trusted("10.0.0.7", asked, has_key=False, token="b" * 64) is not None
    assert why_not_trusted("10.0.0.7", {**asked, "x-eep-token": "ä"}, has_key=False, token="a" * 64) is not None


def test_no_token_is_not_a_token() -> None:
    for given in ({}, {"x-eep-token": ""}):
        assert why_not_trusted("10.0.0.7", {"host": "10.0.0.7", **given}, has_key=False, token="") is not None


def test_the_token_opens_in_place_of_a_key() -> None:
    assert opens("Bearer own", "own")
    for wrong in ("Bearer other", "Bearer öwn", "Bearer ", "own", "Basic own", "", None):
        assert not opens(wrong, "own"), wrong
    assert not opens("Bearer ", "")
