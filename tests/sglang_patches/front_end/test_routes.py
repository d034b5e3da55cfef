"""Which HTTP routes are served: every route of every supported version of SGLang is on one of two lists."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_patches import sglang_version
from sglang_patches.front_end import routes
from sglang_patches.front_end.route_guard import RouteGuard, path_of
from sglang_patches.front_end.routes import ALLOWED, NAMED_BY, REFUSED, RouteList
from tests.sglang_patches.test_targets import VERSIONS, sources

FILES = ("http_server.py", "v1_loads.py", "elastic_ep.py")
"""Those in which SGLang's server has its routes. The second and the third are included in the first."""
NOT_OF_SGLANG = {"/docs", "/docs/oauth2-redirect", "/metrics", "/metrics/", "/openapi.json", "/redoc"}
"""Routes that FastAPI and the Prometheus client add."""
WAYS_TO_ADD = (
    "add_api_route",
    "add_api_websocket_route",
    "add_route",
    "add_websocket_route",
    "include_router",
    "mount",
)


def decorators(tree: ast.AST) -> Iterator[ast.Call]:
    """What stands above functions, and adds them to a router."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for each in node.decorator_list:
                if isinstance(each, ast.Call) and ast.unparse(each.func).split(".")[0] in ("app", "router"):
                    yield each


def routes_of(package: Path) -> set[str]:
    """The routes of SGLang's server, read from its source files."""
    found = set()
    for file in FILES:
        for call in decorators(ast.parse((package / "entrypoints" / file).read_text())):
            if ast.unparse(call.func).endswith(".exception_handler"):
                continue
            written = call.args[0]
            if isinstance(written, ast.Constant):
                found.add(str(written.value))
            else:  # os.environ.get("VARIABLE", "/route"), or a name that was bound to such a thing
                variable = next((each for each in NAMED_BY if each in ast.unparse(written)), None)
                assert variable is not None or ast.unparse(written) == "_ollama_root_route", ast.unparse(call)
                found.add(NAMED_BY[variable or "SGLANG_OLLAMA_ROOT_ROUTE"])
    return found


def is_installed(version: str) -> bool:
    return importlib.util.find_spec("sglang") is not None and sglang_version.installed() == version


def package_of(version: str) -> Path:
    if is_installed(version):
        found = importlib.util.find_spec("sglang")
        assert found is not None
        return Path(next(iter(found.submodule_search_locations or ()))) / "srt"
    return sources(version) / "srt"


@pytest.mark.parametrize("version", VERSIONS)
def test_every_route_of_sglang_is_on_one_of_the_lists(version: str) -> None:
    found = routes_of(package_of(version))
    assert len(found) > 80
    assert sorted(found - ALLOWED - REFUSED.keys()) == [], "say in routes.py whether these are safe"


@pytest.mark.parametrize("version", VERSIONS)
def test_sglang_adds_routes_in_no_other_way(version: str) -> None:
    text = (package_of(version) / "entrypoints" / "http_server.py").read_text()
    ways = [node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    assert [way for way in ways if way in WAYS_TO_ADD] == ["include_router"] * 2, "read those routes in routes_of() too"


def test_no_route_is_on_both_lists_and_none_is_of_no_version() -> None:
    assert ALLOWED & REFUSED.keys() == set()
    known = set().union(*(routes_of(package_of(version)) for version in VERSIONS)) | NOT_OF_SGLANG
    assert sorted((ALLOWED | REFUSED.keys()) - known) == []


@pytest.mark.parametrize("route", sorted(REFUSED))
def test_a_refusal_says_what_to_do(route: str) -> None:
    path = route.replace("{method}", "dump")
    why = RouteList({}).why_refused(path)
    assert why is not None
    assert any(word in why for word in ("Start ", "Use ", "Compare ", "Leave "))
    assert not RouteList({}).is_allowed(path)


def test_a_route_with_a_parameter_has_one_part_in_its_place() -> None:
    known = RouteList({})
    assert known.is_allowed("/v1/responses/resp_1")
    assert known.is_allowed("/v1/responses/resp_1/cancel")
    assert known.is_allowed("/v1/models/org/name")
    assert not known.is_allowed("/v1/responses/resp_1/other")
    assert not known.is_allowed("/v1/models/")


def test_an_operator_may_rename_routes_and_allow_others() -> None:
    known = RouteList({"AIP_PREDICT_ROUTE": "/predict", routes.ALLOW: "/start_profile, /stop_profile"})
    assert [known.is_allowed(path) for path in ("/predict", "/start_profile", "/stop_profile", "/slow_down")] == [
        *(True, True, True, False)
    ]


def test_the_prefix_of_a_server_is_no_part_of_its_routes() -> None:
    assert path_of({"path": "/generate"}) == "/generate"
    assert path_of({"path": "/a/generate", "root_path": "/a"}) == "/generate"
    assert path_of({"path": "/ab/generate", "root_path": "/a"}) == "/ab/generate"
    assert path_of({"path": "/generate", "root_path": "/a"}) == "/generate"


class Guarded:
    """An application with some routes, behind the guard."""

    def __init__(self) -> None:
        fastapi = pytest.importorskip("fastapi")
        app, more = fastapi.FastAPI(), fastapi.APIRouter()
        for router, path in (
            (app, "/generate"),
            (app, "/start_expert_distribution_record"),
            (app, "/brand_new"),
            (more, "/brand_new_too"),
        ):
            router.post(path)(self._serve)
        app.include_router(more)
        app.add_middleware(RouteGuard, known=RouteList({}), routed_by=app.router)
        self._app, self.served = app, 0

    def _serve(self) -> str:
        self.served += 1
        return "done"

    def ask(self, path: str, kind: str = "http") -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        scope = {
            **{"type": kind, "method": "POST", "path": path, "raw_path": path.encode(), "root_path": ""},
            **{"headers": [], "query_string": b"", "http_version": "1.1", "scheme": "http", "subprotocols": []},
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""} if kind == "http" else {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            said.append(dict(message))

        asyncio.run(self._app(scope, receive, send))
        return said


@pytest.mark.parametrize("path", ["/start_expert_distribution_record", "/brand_new", "/brand_new_too"])
def test_what_is_not_known_to_be_safe_is_refused_with_a_sentence(path: str) -> None:
    guarded = Guarded()
    start, body = guarded.ask(path)
    assert (start["status"], guarded.served) == (400, 0)
    assert "eep" in json.loads(body["body"])["error"]["message"]


def test_what_is_known_to_be_safe_is_served_and_what_there_is_not_is_not_found() -> None:
    guarded = Guarded()
    assert guarded.ask("/generate")[0]["status"] == 200
    assert guarded.served == 1
    assert guarded.ask("/nothing_there")[0]["status"] == 404


def test_a_connection_that_stays_open_is_refused_too() -> None:
    (closed,) = Guarded().ask("/v1/realtime", kind="websocket")
    assert closed["type"] == "websocket.close"
    assert closed["reason"]
