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


OnLostCoverage = Literal["refuse", "mask", "make-room"]


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which etcd keeps the views, and the names of the files with what it takes to get in. No secret is in here."""

    url: str
    user: str | None = None
    password_file: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None


class HostOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """This host, where the ranks of several hosts are one instance. Each has as many ranks, with numbers in a row."""

    number: int
    """Of this host; ranks ``number * ranks_each`` and those after it run here."""
    ranks_each: int
    instance: str
    """The name under which the hosts of the instance find each other in the store."""
    address: str
    """That of this host, at which the others reach it."""
    key_file: str
    """The file with the key of the job, which all hosts share."""
    provider: str = "tcp"
    """Of libfabric."""
    timeout_s: float = 1.5
    """How long another host may be silent before it counts as lost."""

    @property
    def ranks(self) -> range:
        return range(self.number * self.ranks_each, (self.number + 1) * self.ranks_each)


class AnchorOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where weights outlive this server, and the number of this server among those that were there."""

    directory: str
    server: int


class HardwareOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Signs of failing hardware."""

    watched: bool = False
    """A process watches the GPUs."""
    reactions: str | None = None
    """The file with what signs mean for ranks; None: only what EEP brings along."""


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
    """How many ranks it takes to hold every expert in the slots that they usually have."""
    timeout_ms: float = 1000.0
    repair_timeout_s: float = 120.0
    """How long ranks may take to enter a view. Mostly they bring in experts."""
    stall_timeout_s: float = 60.0
    """How long a rank that runs may make no progress; 0: for ever."""
    hang_timeout_s: float = 0.0
    """How long a rank that runs may sleep without a reason; 0: for ever."""
    experts: int | None = None
    """How many each MoE layer of the model has; None if its configuration does not say."""
    portion_tokens: int | None = None
    """For how many tokens of each rank a region has room; None: as :func:`eep.data_plane.region_size.choose_room` says."""
    redundant_experts: int = 0
    """Slots beyond the number of experts, over all ``max_ranks``."""
    backup: Literal["off", "live", "checkpoint"] = "off"
    store: StoreOptions | None = None
    """None: the views are kept inside the supervisor."""
    host: HostOptions | None = None
    """None: all ranks are on this host."""
    on_lost_coverage: OnLostCoverage = "refuse"
    most_slots: int = 0
    """For how many slots a rank has addresses: with ``make-room`` more than it usually has memory for; 0: for no more."""
    mask_after_s: float | None = None
    """How long ranks wait for experts from a backup or from disk before they serve without them; None: until they come."""
    balance: BalanceOptions | None = None
    """None: no expert moves unless a rank is lost or comes back."""
    shadows: bool = False
    """Every expert has two copies, where slots allow, before any has three."""
    hardware: HardwareOptions = HardwareOptions()
    relaunch: bool = True
    faults: bool = False
    json_log: bool = False
    """A line about a change of who is in is JSON."""
    traces: bool = False
    """A change of who is in is a span of OpenTelemetry."""
    seeded: bool = False
    """Sampling depends on the seed of a request and the position of the token, and on nothing else."""
    spares: int = 0
    running_per_rank: int = 0
    """How many requests a rank runs at once at most."""
    max_queued: int | None = None
    """How many open requests there may be beyond those that the ranks of this host can run at once; None for any number."""
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
    def own_ranks(self) -> range:
        """The ranks that this host starts with."""
        return range(self.ranks) if self.host is None else self.host.ranks

    @property
    def standby_ranks(self) -> range:
        """The ranks of this host that an operator may add. Where there are several hosts, a host is added whole."""
        return range(self.ranks, self.max_ranks) if self.host is None else range(0)

    @property
    def remote_ranks(self) -> frozenset[int]:
        """The ranks of other hosts."""
        return frozenset() if self.host is None else frozenset(range(self.max_ranks)) - frozenset(self.host.ranks)

    @property
    def host_name(self) -> str:
        """That by which this host is known to the others."""
        return "localhost" if self.host is None else f"node-{self.host.number}"

    def host_of(self, rank: int) -> int:
        return 0 if self.host is None else rank // self.host.ranks_each

    @property
    def has_whole_spares(self) -> bool:
        """Whether a spare is a whole rank: it starts from what its rank keeps, and can where that keeps everything."""
        return self.keeps_context and self.keeps_weights

    def most_open(self, ranks: int) -> int | None:
        """How many requests may be open while ``ranks`` are in. A lost rank comes back, so its loss lowers no bound."""
        if self.max_queued is None:
            return None
        return self.max_queued + self.running_per_rank * max(ranks, len(self.own_ranks))

    @property
    def masks(self) -> bool:
        """Whether ranks may serve without some experts."""
        return self.on_lost_coverage == "mask"

    @property
    def least_to_serve(self) -> int:
        """How many ranks can serve; fewer wait for others."""
        if self.on_lost_coverage == "make-room" and self.experts is not None:
            return -(-self.experts // self.most_slots)
        return 1 if self.masks else self.fewest_ranks

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
