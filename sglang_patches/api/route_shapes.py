"""What OpenAPI shows of EEP's routes: their fields, their answers, and that they want a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Security
from fastapi.security import HTTPBearer

from eep.operations.operation_table import ToldOperation

Shape = dict[str, Any]
_KEY = HTTPBearer(
    auto_error=False,
    scheme_name="adminKey",
    description="SGLang's --admin-api-key, or --api-key; none if the server has neither",
)
KEYED = [Security(_KEY)]
"""Of a route. It only shows in the description: SGLang has checked the key."""
OBJECT: Shape = {"type": "object"}
REFUSAL: Shape = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": "null"},
                "code": {"type": "integer"},
                "retry": {"type": "boolean", "description": "whether asking the same again may help"},
            },
        }
    },
}
REFUSALS = {
    400: "a field is wrong",
    403: "no change is taken from there",
    404: "there is none of that name",
    409: "the id names another one",
    429: "too many wait already; Retry-After says when to ask again",
    503: "not now; Retry-After says when to ask again",
}


def shape_of(form: type[msgspec.Struct]) -> Shape:
    shape: Shape = msgspec.json.schema(form)["$defs"][form.__name__]
    return shape


OPERATION = shape_of(ToldOperation)
OPERATION_ANSWERS = {200: ("it has ended: done or failed", OPERATION), 202: ("accepted or running", OPERATION)}


def answers(found: Mapping[int, tuple[str, Shape]], *refused: int) -> dict[int | str, Any]:
    """The answers of a route by status: what it found, and how it may refuse."""
    told = {**found, **{status: (REFUSALS[status], REFUSAL) for status in refused}}
    return {
        status: {"description": text, "content": {"application/json": {"schema": shape}}}
        for status, (text, shape) in told.items()
    }


def body_of(form: type[msgspec.Struct]) -> Shape:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": shape_of(form)}}}}


def query_of(**fields: Shape) -> Shape:
    return {"parameters": [{"name": name, "in": "query", "schema": shape} for name, shape in fields.items()]}


def path_of(**fields: Shape) -> Shape:
    named = [{"name": name, "in": "path", "required": True, "schema": shape} for name, shape in fields.items()]
    return {"parameters": named}


def fields_of_route(*each: Shape) -> Shape:
    """Those of its path and of its query together."""
    return {"parameters": [field for fields in each for field in fields["parameters"]]}
