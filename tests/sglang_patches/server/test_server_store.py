"""``--eep-store`` against a real etcd with users, passwords and certificates: what gets in, and what the start says of what
does not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eep.control.store.key_value import ABSENT
from eep.control.wire.sealed_frames import new_key
from sglang_patches.options import StoreOptions
from sglang_patches.server import flags, server_store
from tests.control.store.certificates import Authority
from tests.control.store.etcd_cluster import EtcdCluster
from tests.control.store.guarded_etcd import PASSWORD, GuardedEtcd, served_with, why_no_guarded_etcd
from tests.sglang_patches.server.arguments import given

pytestmark = pytest.mark.skipif(why_no_guarded_etcd() is not None, reason=str(why_no_guarded_etcd()))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedEtcd]:
    etcd = GuardedEtcd(tmp_path_factory.mktemp("etcd"))
    yield etcd
    etcd.close()


def options(guarded: GuardedEtcd, user: str = "eep", password: str = PASSWORD, **changes: Any) -> StoreOptions:
    wanted = {"url": guarded.url, "user": user, "password_file": guarded.password_file(password), "ca": guarded.ca}
    return StoreOptions(**{**wanted, **changes})


def test_a_user_who_may_write_gets_in(guarded: GuardedEtcd) -> None:
    async def body() -> None:
        store = server_store.open_store(options(guarded), new_key())
        assert store is not None
        assert (await store.compare_and_swap("k", ABSENT, b"v")).done
        entry = await store.get("k")
        assert entry is not None
        assert entry.value == b"v"
        await store.close()

    server_store.check_reachable(options(guarded))
    asyncio.run(body())


def why_refused(wanted: StoreOptions) -> str:
    with pytest.raises(SystemExit) as caught:
        server_store.check_reachable(wanted)
    said = str(caught.value)
    assert said.startswith(f"--eep-store {wanted.url}: ")
    return said


def test_a_wrong_password_says_where_to_look(guarded: GuardedEtcd) -> None:
    wanted = options(guarded, password="wrong")
    said = why_refused(wanted)
    assert "does not accept the user and password" in said
    assert f"check --eep-store-user eep and what {wanted.password_file} holds" in said
    assert "wrong" not in said.replace(str(wanted.password_file), "")


def test_no_user_at_all_says_which_flags_are_missing(guarded: GuardedEtcd) -> None:
    said = why_refused(StoreOptions(url=guarded.url, ca=guarded.ca))
    assert "wants a user and password" in said
    assert said.endswith("give --eep-store-user and --eep-store-password-file")


def test_a_user_who_may_not_write_says_what_to_allow(guarded: GuardedEtcd) -> None:
    assert why_refused(options(guarded, user="idle")).endswith(
        "have etcd let user idle read and write the keys that begin with /eep/"
    )


def test_a_certificate_of_another_ca_is_not_trusted(guarded: GuardedEtcd, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "stranger")
    said = why_refused(options(guarded, ca=str(stranger.own.certificate)))
    assert "the certificate of 127.0.0.1" in said
    assert "is not trusted" in said
    assert "the CA that signed it with --eep-store-ca" in said


def test_a_certificate_for_another_name_is_not_trusted(guarded: GuardedEtcd) -> None:
    said = why_refused(options(guarded, url=guarded.url.replace("127.0.0.1", "localhost")))
    assert "is not trusted" in said
    assert "a name that it has in the URL" in said


def test_plain_http_to_an_etcd_with_certificates_is_no_hang(guarded: GuardedEtcd) -> None:
    assert "check the address" in why_refused(StoreOptions(url=guarded.url.replace("https", "http")))


def test_one_node_of_several_is_enough_at_the_start(guarded: GuardedEtcd) -> None:
    server_store.check_reachable(options(guarded, url=f"https://127.0.0.1:9,{guarded.url}"))


def test_the_command_line_gets_in(guarded: GuardedEtcd) -> None:
    wanted = options(guarded)
    parsed = flags.parse(
        given(
            eep_store=wanted.url,
            eep_store_user=wanted.user,
            eep_store_password_file=wanted.password_file,
            eep_store_ca=wanted.ca,
        )
    )
    assert parsed.store == wanted


def test_an_etcd_that_asks_for_certificates_of_its_clients(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    mine = authority.sign("mine")
    asks = ("--client-cert-auth", "--trusted-ca-file", str(authority.own.certificate))
    tls = (*served_with(authority.sign("asking")), *asks)
    cluster = EtcdCluster(tmp_path, nodes=1, tls=tls, trust=authority.trusted(mine))
    try:
        (url,) = cluster.endpoints
        ca, cert, key = str(authority.own.certificate), str(mine.certificate), str(mine.key)
        server_store.check_reachable(StoreOptions(url=url, ca=ca, cert=cert, key=key))
        assert "--eep-store-cert" in why_refused(StoreOptions(url=url, ca=ca))
        stranger = Authority(tmp_path / "stranger").sign("stranger")
        said = why_refused(StoreOptions(url=url, ca=ca, cert=str(stranger.certificate), key=str(stranger.key)))
        assert "--eep-store-cert" in said, "whether etcd's own words came, or only the end of the connection"
    finally:
        cluster.close()


def test_a_user_where_etcd_has_none_says_so(tmp_path: Path) -> None:
    cluster = EtcdCluster(tmp_path, nodes=1)
    try:
        password = tmp_path / "password"
        password.touch(mode=0o600)
        password.write_text("secret")
        said = why_refused(StoreOptions(url=cluster.endpoints[0], user="me", password_file=str(password)))
        assert "leave out --eep-store-user" in said
        tls = Authority(tmp_path / "ca").own.certificate
        secure = cluster.endpoints[0].replace("http", "https")
        assert "check the address" in why_refused(StoreOptions(url=secure, ca=str(tls)))
    finally:
        cluster.close()
