"""The recipe of a rank: SGLang's arguments for it as JSON, so that a rank can start again from a file without unpickling.

Beside the types of JSON there are tuples, sets, enums and records (dataclasses and msgspec structs). A record is written with
the name of its class, and rebuilt without running its constructor: its fields are resolved already. Only records of SGLang
and of this plugin are rebuilt.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec

_KIND, _VALUE = "eep:kind", "eep:value"
_PACKAGES = ("sglang", "sglang_patches")
CACHES = ("_model_config", "model_config", "_mx_config_cache")
"""Attributes that are not written: SGLang makes them again when they are missing. The second is what the first is called up
to 0.5.18."""


class UnwritableValue(TypeError):
    """JSON has no form for a value."""


def write(path: Path, value: object) -> None:
    """Write ``value`` so that only the owner of the file can read it. A reader sees all of it or nothing."""
    text = json.dumps(to_json(value))
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    fresh.rename(path)


def read(path: Path) -> Any:
    return from_json(json.loads(path.read_text()))


def to_json(value: Any, where: str = "the arguments") -> Any:
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        return value
    if kind is list:
        return [to_json(each, where) for each in value]
    if kind is dict and all(type(key) is str for key in value) and _KIND not in value:
        return {key: to_json(each, f"{where}.{key}") for key, each in value.items()}
    if kind is dict:
        return _tagged("dict", [[to_json(key, where), to_json(each, where)] for key, each in value.items()])
    if kind in (tuple, set, frozenset):
        return _tagged(kind.__name__, [to_json(each, where) for each in value])
    if isinstance(value, enum.Enum):
        return _tagged(f"enum {_name(kind, where)}", value.name)
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in kind.__struct_fields__}
        return _record("struct", kind, fields, getattr(value, "__dict__", {}), where)
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        extra = {name: each for name, each in getattr(value, "__dict__", {}).items() if name not in fields}
        return _record("dataclass", kind, fields, extra, where)
    raise UnwritableValue(
        f"{where} holds a {kind.__module__}.{kind.__qualname__}, which has no form in JSON: a new process cannot get it"
    )


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: from_json(each) for key, each in value.items()}
    kind, _, name = value[_KIND].partition(" ")
    held = value[_VALUE]
    match kind:
        case "dict":
            return {from_json(key): from_json(each) for key, each in held}
        case "tuple" | "set" | "frozenset":
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](from_json(each) for each in held)
        case "enum":
            return _find(name)[held]
        case "struct":
            made = _find(name)(**{key: from_json(each) for key, each in held["fields"].items()})
            if held["extra"]:
                made.__dict__.update({key: from_json(each) for key, each in held["extra"].items()})
            return made
        case "dataclass":
            cls = _find(name)
            made = cls.__new__(cls)
            for key, each in {**held["fields"], **held["extra"]}.items():
                object.__setattr__(made, key, from_json(each))
            return made
    raise ValueError(f"{kind!r} names no kind of value: the file was not written by this version of eep")


def _record(kind: str, cls: type, fields: dict[str, Any], extra: dict[str, Any], where: str) -> Any:
    kept = {name: each for name, each in extra.items() if name not in CACHES}
    parts = {
        "fields": {name: to_json(each, f"{where}.{name}") for name, each in fields.items() if name not in CACHES},
        "extra": {name: to_json(each, f"{where}.{name}") for name, each in kept.items()},
    }
    return _tagged(f"{kind} {_name(cls, where)}", parts)


def _tagged(kind: str, value: object) -> dict[str, object]:
    return {_KIND: kind, _VALUE: value}


def _name(cls: type, where: str) -> str:
    if cls.__module__.split(".")[0] not in _PACKAGES or "<" in cls.__qualname__:
        raise UnwritableValue(
            f"{where} holds a {cls.__module__}.{cls.__qualname__}, which is not of SGLang or eep: a new process cannot get it"
        )
    return f"{cls.__module__}:{cls.__qualname__}"


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    if module.split(".")[0] not in _PACKAGES:
        raise ValueError(f"{name} is not of SGLang or eep, and is not rebuilt")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
