"""What the operator asked the plugin for, as every process of the server knows it.

The launcher parses the flags once and leaves them in one environment variable, which its child processes inherit. SGLang's
own ``ServerArgs`` is sealed and travels by pickle, so the plugin adds nothing to it.
"""

from __future__ import annotations

import math
import os
from typing import Literal

import msgspec

VARIABLE = "EEP_SGLANG_OPTIONS"
DIRECTORY = "EEP_SERVER_DIR"
"""Where a server's processes find its supervisor. Ranks have another variable, by which the keeper finds what to end."""


DRAIN_LIMIT = "EEP_DRAIN_S"
RELAUNCH_LIMIT = "EEP_RELAUNCH_LIMIT"


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which etcd keeps the views, and the names of the files with what it takes to get in. No secret is in here."""

    url: str
    user: str | None = None
    password_file: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None


class AnchorOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where weights outlive this server, and the number of this server among those that were there."""

    directory: str
    server: int


class BalanceOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Experts move while the server runs: what SGLang's flags for its own balancer say."""

    every: int
    """After how many steps ranks look whether experts should move."""
    least: float = 1.0
    """They move only where the balancedness is below it."""
    layers: int | None = None
    """In how many layers they move at once; None for all."""
    most: int = 8
    """How many experts move to a rank at once."""


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The values of the ``--eep-*`` flags. That there are any means that ``--ep-backend eep`` was given."""

    ranks: int
    """How many ranks the server starts with."""
    max_ranks: int
    """How many ranks there may ever be. SGLang is told this number, and everything is laid out for it."""
    fewest_ranks: int = 1
    """How many ranks it takes to hold every expert."""
    timeout_ms: float = 1000.0
    repair_timeout_s: float = 120.0
    """How long ranks may take to enter a view. Mostly they bring in experts."""
    stall_timeout_s: float = 60.0
    """How long a rank that runs may make no progress; 0: for ever."""
    experts: int | None = None
    """How many each MoE layer of the model has; None if its configuration does not say."""
    redundant_experts: int = 0
    """Slots beyond the number of experts, over all ``max_ranks``."""
    backup: Literal["off", "live", "checkpoint"] = "off"
    store: StoreOptions | None = None
    """None: the views are kept inside the supervisor."""
    on_lost_coverage: Literal["refuse", "mask"] = "refuse"
    balance: BalanceOptions | None = None
    """None: no expert moves unless a rank is lost or comes back."""
    shadows: bool = False
    """Every expert has two copies, where slots allow, before any has three."""
    relaunch: bool = True
    faults: bool = False
    seeded: bool = False
    """Sampling depends on the seed of a request and the position of the token, and on nothing else."""
    spares: int = 0
    running_per_rank: int = 0
    """How many requests a rank runs at once at most."""
    max_queued: int | None = None
    """How many open requests there may be beyond those that all ranks can run at once; None for any number."""
    keeps_context: bool = True
    """The caches of a rank outlive it, so that its requests bring their contexts along."""
    keeps_weights: bool = True
    """The weights of a rank outlive it, so that its next life need not load them."""
    anchor: AnchorOptions | None = None
    """None: weights outlive their rank, not the server."""
    kv_backup: int = 0
    """Bytes of host memory for copies of contexts, of all ranks together; 0 for none."""
    shares_gpu: bool = False
    """There are fewer GPUs than ranks."""

    @property
    def has_whole_spares(self) -> bool:
        """Whether a spare is a whole rank: it starts from what its rank keeps, and can where that keeps everything."""
        return self.keeps_context and self.keeps_weights

    def most_open(self, ranks: int) -> int | None:
        """How many requests may be open while ``ranks`` are in. A lost rank comes back, so its loss lowers no bound."""
        if self.max_queued is None:
            return None
        return self.max_queued + self.running_per_rank * max(ranks, self.ranks)

    @property
    def least_to_serve(self) -> int:
        """How many ranks can serve; fewer wait for others."""
        return self.fewest_ranks if self.on_lost_coverage == "refuse" else 1

    def publish(self) -> None:
        """Leave the options where this process, and those that it starts from now on, find them."""
        os.environ[VARIABLE] = msgspec.json.encode(self).decode()


def drain_limit() -> float:
    """How many seconds the requests under way have after SIGTERM. SystemExit if the variable is no such number."""
    return _number(DRAIN_LIMIT, 5.0, least=0.0)


def relaunch_limit() -> int:
    """How many times in a row a rank may fail before it is given up. SystemExit if the variable is no such number."""
    return int(_number(RELAUNCH_LIMIT, 50.0, least=1.0))


def _number(name: str, default: float, least: float) -> float:
    text = os.environ.get(name) or str(default)
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not least <= found < 1e6:
        raise SystemExit(f"{name}={text}: give a number from {least:g} to 1e6, or unset the variable")
    return found


def current() -> ServerOptions | None:
    """The options of this server; None if it was started without ``--ep-backend eep``."""
    text = os.environ.get(VARIABLE)
    return msgspec.json.decode(text, type=ServerOptions) if text else None


def required() -> ServerOptions:
    """The options, in code that runs only with ``--ep-backend eep``."""
    options = current()
    if options is None:
        raise RuntimeError(f"{VARIABLE} is not set: no server with --ep-backend eep has started this process")
    return options
