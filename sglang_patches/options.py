"""What the user asked the plugin for, as every process of the server knows it.

The launcher parses the flags once and leaves them in one environment variable, which all its child processes inherit.
SGLang's own ``ServerArgs`` is sealed and travels by pickle, so nothing of ours is added to it.
"""

from __future__ import annotations

import os
from typing import Literal

import msgspec

VARIABLE = "EEP_SGLANG_OPTIONS"
DIRECTORY = "EEP_SERVER_DIR"
"""Where a server's processes find its supervisor. Not the variable of the ranks: by that a keeper finds whom to end."""


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The values of the ``--eep-*`` flags. That there are any means that ``--ep-backend eep`` was given."""

    ranks: int
    """With how many the server starts."""
    max_ranks: int
    """How many there may ever be. SGLang is told this number, and everything is laid out for it."""
    fewest_ranks: int = 1
    """How many it takes to hold every expert."""
    timeout_ms: float = 1000.0
    repair_timeout_s: float = 120.0
    """How long ranks have to settle in a view: mostly to bring in experts."""
    redundant_experts: int = 0
    """Slots beyond the number of experts, over all ``max_ranks``."""
    backup: Literal["off", "live", "checkpoint"] = "off"
    store: str = ""
    on_lost_coverage: Literal["refuse", "mask"] = "refuse"
    relaunch: bool = True
    faults: bool = False
    seeded: bool = False
    """Sampling goes by a request's seed and the position of the token, and by nothing else."""
    spares: int = 0
    shares_gpu: bool = False
    """There are fewer GPUs than ranks."""

    def publish(self) -> None:
        """Let this process and those it starts from now on know."""
        os.environ[VARIABLE] = msgspec.json.encode(self).decode()


def current() -> ServerOptions | None:
    """The options of this server; None if it was started without ``--ep-backend eep``."""
    text = os.environ.get(VARIABLE)
    return msgspec.json.decode(text, type=ServerOptions) if text else None


def required() -> ServerOptions:
    """The options, in code that runs only with ``--ep-backend eep``."""
    options = current()
    if options is None:
        raise RuntimeError(f"{VARIABLE} is not set: this process belongs to no server started with --ep-backend eep")
    return options
