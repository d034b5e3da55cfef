"""An etcd with TLS and users, for tests. The users are root; eep, who may write to /eep/; and idle, who may not."""

from __future__ import annotations

import json
import urllib.request
from base64 import b64encode
from pathlib import Path
from typing import Any

from tests.control.store.certificates import Authority, Certificate, why_no_certificates
from tests.control.store.etcd_cluster import EtcdCluster, why_not

PASSWORD = "correct-horse"


def why_no_guarded_etcd() -> str | None:
    return why_not() or why_no_certificates()


def served_with(certificate: Certificate) -> tuple[str, ...]:
    """The options of an etcd that has this certificate."""
    return ("--cert-file", str(certificate.certificate), "--key-file", str(certificate.key))


class GuardedEtcd:
    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory / "ca")
        self._directory, self._trust = directory, self.authority.trusted()
        self._token = ""
        self._cluster = EtcdCluster(directory, 1, tls=served_with(self.authority.sign("etcd")), trust=self._trust)
        try:
            self._add_users()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return self._cluster.endpoints[0]

    @property
    def ca(self) -> str:
        return str(self.authority.own.certificate)

    def password_file(self, password: str = PASSWORD) -> str:
        file = self._directory / f"password-{password}"
        file.touch(mode=0o600)
        file.write_text(password)
        return str(file)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """As root, once there are users."""
        headers = {"Authorization": self._token} if self._token else {}
        request = urllib.request.Request(f"{self.url}/v3/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30, context=self._trust) as answer:
            return dict(json.load(answer))

    def close(self) -> None:
        self._cluster.close()

    def _add_users(self) -> None:
        self.ask("auth/role/add", name="root")
        self.ask("auth/role/add", name="writes")
        permission = {"permType": "READWRITE", "key": _b64("/eep/"), "range_end": _b64("/eep0")}
        self.ask("auth/role/grant", name="writes", perm=permission)
        for user, role in (("root", "root"), ("eep", "writes"), ("idle", "")):
            self.ask("auth/user/add", name=user, password=PASSWORD)
            if role:
                self.ask("auth/user/grant", user=user, role=role)
        self.ask("auth/enable")
        self._token = self.ask("auth/authenticate", name="root", password=PASSWORD)["token"]


def _b64(text: str) -> str:
    return b64encode(text.encode()).decode()
