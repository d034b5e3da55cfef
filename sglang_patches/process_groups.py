"""SGLang's process groups. They are gloo's where there is no GPU."""

from __future__ import annotations


def register() -> None:
    pass
