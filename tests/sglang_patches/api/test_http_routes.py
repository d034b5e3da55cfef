"""Who may call which route, and what the schema says of it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eep.console.server_files import TOKEN_HEADER, read_files
from sglang_patches.api import mounting
from sglang_patches.api.mounting import is_keyless
from sglang_patches.front_end.routes import OWN, RouteList
from tests.sglang_patches.api.served_instance import Served, run


def test_others_may_not_change_anything_without_a_key(served: Served, tmp_path: Path) -> None:
    async def body() -> None:
        code, told = await served.apply("10.0.0.7", id="a", action="remove", rank=1)
        assert code == 403
        assert "--admin-api-key" in told["error"]["message"]
        assert served.instance.given == []
        keyed = Served(tmp_path, has_key=True)
        assert (await keyed.apply("10.0.0.7", id="a", action="remove", rank=1))[0] == 200

    run(body)


def test_the_token_that_the_server_leaves_in_its_directory_lets_its_user_in(served: Served, tmp_path: Path) -> None:
    parts: Any = importlib.import_module("sglang_patches.api.served_api")
    served.api.token = parts._say_where(tmp_path, SimpleNamespace(host="10.0.0.7", port=30000, ssl_certfile=None))
    files = read_files(tmp_path)
    assert files is not None
    assert files.url == "http://10.0.0.7:30000"

    async def body() -> None:
        for token, code in ((files.token, 200), ("0" * 64, 403)):
            asked = {"id": f"a-{code}", "action": "undrain"}
            told = await served.ask("POST", "/eep/apply?wait=10", "10.0.0.7", json=asked, headers={TOKEN_HEADER: token})
            assert told[0] == code

    run(body)


def test_the_user_of_the_directory_needs_no_other_key(sglang: None, monkeypatch: pytest.MonkeyPatch) -> None:
    auth: Any = importlib.import_module("sglang.srt.utils.auth")
    monkeypatch.setattr(mounting, "_tokens", {"own"})

    def allowed(path: str, header: str | None) -> bool:
        named = {"api_key": None, "admin_api_key": "secret", "auth_level": auth.AuthLevel.ADMIN_OPTIONAL}
        decision = mounting._decide(
            auth.decide_request_auth, method="POST", path=path, authorization_header=header, **named
        )
        return bool(decision.allowed)

    assert allowed("/eep/apply", "Bearer own")
    assert allowed("/eep/apply", "Bearer secret")
    assert not allowed("/eep/apply", None)
    assert not allowed("/flush_cache", "Bearer own")


def test_the_schema_shows_every_route_and_the_guard_lets_them_through(served: Served) -> None:
    shown = served.app.openapi()["paths"]
    assert shown.keys() == OWN
    apply = shown["/eep/apply"]["post"]
    assert "deadline_s" in json.dumps(apply["requestBody"])
    assert apply["responses"].keys() == {"200", "202", "400", "403", "409", "429", "503"}
    assert "undone" in json.dumps(apply["responses"]["200"])
    assert "retry" in json.dumps(apply["responses"]["429"])
    assert [each["name"] for each in apply["parameters"]] == ["wait"]
    assert "adminKey" in served.app.openapi()["components"]["securitySchemes"]


def test_the_schema_shows_how_each_route_answers_and_whether_it_wants_a_key(served: Served) -> None:
    auth: Any = importlib.import_module("sglang.srt.utils.auth")
    shown = served.app.openapi()["paths"]
    for route in served.app.routes:
        if getattr(route, "path", "") in OWN:
            (method,) = route.methods
            told = shown[route.path][method.lower()]
            assert "422" not in told["responses"], route.path
            is_admin = getattr(route.endpoint, "_auth_level", None) is auth.AuthLevel.ADMIN_OPTIONAL
            assert (told.get("security") == [{"adminKey": []}]) is is_admin, route.path


def test_the_guard_knows_every_route() -> None:
    assert all(RouteList({}).is_allowed(path) for path in ("/eep/status", "/eep/operations/x", "/eep/ranks/3/live"))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/eep/apply"),
        ("POST", "/eep/evidence"),
        ("POST", "/eep/operations/x/cancel"),
        ("GET", "/eep/status"),
        ("GET", "/eep/experts"),
        ("GET", "/eep/events"),
        ("GET", "/eep/operations"),
        ("GET", "/eep/operations/x"),
        ("POST", "/v1/fault_tolerance/apply"),
        ("GET", "/fault_tolerance/status"),
    ],
)
def test_sglang_asks_for_its_admin_key(served: Served, method: str, path: str) -> None:
    auth: Any = importlib.import_module("sglang.srt.utils.auth")
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    level = auth._get_auth_level_from_app_and_scope(served.app, scope)
    assert level is auth.AuthLevel.ADMIN_OPTIONAL


@pytest.mark.parametrize(
    ("method", "path", "keyless"),
    [
        ("GET", "/eep/", True),
        ("GET", "/eep/ready", True),
        ("GET", "/eep/ranks/12/live", True),
        ("GET", "/eep/ranks/12/ready", True),
        ("GET", "/eep/ranks/12/stop", False),
        ("POST", "/eep/apply", False),
        ("POST", "/eep/", False),
        ("GET", "/eep/status", False),
        ("GET", "/eep/events", False),
        ("GET", "/v1/fault_tolerance/status", False),
        ("GET", "/eep/ranks/1/live/../../status", False),
    ],
)
def test_only_probes_and_the_page_need_no_key(method: str, path: str, keyless: bool) -> None:
    assert is_keyless(method, path) is keyless
