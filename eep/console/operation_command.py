"""Asks for an operation, and says how it goes: over HTTP, or, where no HTTP answers, by the supervisor of a directory.

A server carries out one operation on ranks after the other. So a command leaves its operation to the server, and carries it
out itself only while there is none. Ctrl-C ends the operation, and waits until what it did is taken back.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from eep.console.api_client import ApiClient, ApiError
from eep.console.printable import printable
from eep.console.server_choice import ServerChoice
from eep.console.told_shapes import OperationShape
from eep.operations.next_order import Order, why_refused
from eep.operations.operation_request import OperationRequest, parse_request
from eep.operations.operation_runner import TAKEN_BACK_WITHIN_S, OperationRunner, order_name

FAILED, UNFINISHED, INTERRUPTED = 3, 4, 130
"""Exit codes."""
_ENDED = ("done", "failed")
_LOOKS_EVERY = 0.05
_LONGEST_QUESTION = 20.0
_MORE_THAN_ITS_DEADLINE_S = TAKEN_BACK_WITHIN_S + 5.0
"""How long an operation is asked after that has not ended by its deadline."""
_BY_SERVER = ("drain", "undrain", "role")
"""What only a front end can do."""


def operate(options: argparse.Namespace) -> int:
    request = _request_of(options)
    server = ServerChoice.of(options)
    if server.directory is None or request.action in _BY_SERVER:
        if server.api is None:
            raise ValueError("the server does not say where it serves HTTP; give --url")
        return _ask_server(server.api, request, waits=options.wait)
    if server.api is not None and server.serves_http:
        return _ask_server(server.api, request, waits=options.wait)
    if options.wait:
        return _carry_out(server.directory, request)
    return _ask_once(server.directory, request)


def _request_of(options: argparse.Namespace) -> OperationRequest:
    """Checked before anything is asked."""
    fields = {name: getattr(options, name, None) for name in ("rank", "ranks", "role")}
    return parse_request(
        msgspec.json.encode(
            {
                "id": options.operation or uuid.uuid4().hex,
                "action": options.action,
                "deadline_s": options.within,
                **{name: value for name, value in fields.items() if value is not None},
            }
        )
    )


def _ask_server(api: ApiClient, request: OperationRequest, *, waits: bool) -> int:
    until, said = time.monotonic() + request.deadline_s + _MORE_THAN_ITS_DEADLINE_S, ""
    body = msgspec.structs.asdict(request)
    try:
        while True:
            # The same question again and again: the id sees to it that it is done once.
            told: dict[str, Any] = api.post(f"/eep/apply?wait={int(waits)}", body, _LONGEST_QUESTION, OperationShape)
            if told["state"] in _ENDED or not waits or time.monotonic() > until:
                break
            said = _say(told, said)
    except KeyboardInterrupt:
        return _cancel(api, request.id)
    except OSError as error:
        raise ConnectionError(f"{error}; the server may still do it: ask again with --operation {request.id}") from None
    if told["state"] not in _ENDED and not waits:
        print(printable(f"{told['state']}: {told['reason']}; operation {request.id}"))
        return 0
    return _finish(told)


def _cancel(api: ApiClient, ident: str) -> int:
    """A second Ctrl-C leaves it to the server."""
    until, said = time.monotonic() + _MORE_THAN_ITS_DEADLINE_S, ""
    while True:
        try:
            told: dict[str, Any] = api.post(
                f"/eep/operations/{quote(ident, safe='')}/cancel", {}, _LONGEST_QUESTION, OperationShape
            )
        except ApiError as error:
            if error.status == 404:
                return INTERRUPTED  # the server has not heard of it
            raise
        if told["state"] in _ENDED or time.monotonic() > until:
            break
        said = _say(told, said)
        time.sleep(_LOOKS_EVERY)
    _finish(told)
    return INTERRUPTED


def _carry_out(directory: Path, request: OperationRequest) -> int:
    from eep.operations.supervisor_access import SupervisorAccess

    async def run() -> tuple[dict[str, Any], bool]:
        runner = OperationRunner(SupervisorAccess(directory))
        (operation, _), said, cancelled = runner.submit(request), "", False
        while not operation.has_ended:
            try:
                said = _say(operation.describe(), said)
                await asyncio.sleep(_LOOKS_EVERY)
            except asyncio.CancelledError:  # that is how the first Ctrl-C arrives; the second one ends this process
                cancelled = True
                runner.cancel(request.id)
        return operation.describe(), cancelled

    told, cancelled = asyncio.run(run())
    code = _finish(told)
    return INTERRUPTED if cancelled else code


def _ask_once(directory: Path, request: OperationRequest) -> int:
    """Without waiting for it. The supervisor knows neither how many ranks hold every expert nor which of them serve
    requests."""
    from eep.control.wire.client import ask_supervisor
    from eep.control.wire.messages import ASKED_BEFORE, AskOperation
    from eep.operations.host_status import read_status
    from eep.operations.instance_standing import InstanceStanding

    assert request.rank is not None  # only operations on one rank are not waited for
    if request.action == "remove":
        refused = why_refused(request, InstanceStanding.of(read_status(directory)))
        if refused is not None:
            raise ValueError(refused.reason)
    name = order_name(request.id, Order(request.action, request.rank))
    answer = ask_supervisor(directory, AskOperation(name, request.action, request.rank))
    if not answer.ok:
        raise ValueError(answer.body)
    if answer.body == ASKED_BEFORE:
        print(f"operation {request.id} was asked for before")
    else:
        print(f"asked to {request.action} rank {request.rank}; operation {request.id}")
    return 0


def _say(told: dict[str, Any], said: str) -> str:
    if told["reason"] != said:
        print(printable(f"{told['state']}: {told['reason']}"), flush=True)
    return str(told["reason"])


def _finish(told: dict[str, Any]) -> int:
    print(printable(f"{told['state']}: {told['reason']}"))
    if told["undone"]:
        print(printable(f"taken back: {', '.join(told['undone'])}"))
    return {"done": 0, "failed": FAILED}.get(told["state"], UNFINISHED)
