"""Gaps of SGLang's torch-native path on a CPU, filled by hooks."""

from __future__ import annotations


def register() -> None:
    pass
