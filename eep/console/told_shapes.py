"""The form of what a server tells the console, as far as the console shows it. Other fields may be there, too."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

Count = Annotated[int, Meta(ge=-1, lt=1 << 53)]
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]


class RankShape(Struct):
    status: str
    incarnation: Count
    pid: Count | None
    failures: Count
    still_for: Seconds | None
    is_in: bool = field(name="in")
    since: Seconds | None = None
    role: str = "both"
    requests: Count | None = None
    kv_tokens: Count | None = None
    kv_room: Count | None = None
    room_bytes: Count | None = None
    experts: Count | None = None
    host: str | None = None
    device: str | None = None


class ChangeUnderWay(Struct):
    seconds: Seconds
    settled: list[Count]
    experts: Count
    bytes: dict[str, Count]


class ChangesShape(Struct):
    under_way: ChangeUnderWay | None = None


class RunningOperation(Struct):
    id: str
    action: str
    state: str
    reason: str


class MarginShape(Struct):
    any_ranks: Count
    ranks: list[Count]
    repairable_ranks: Count
    any_hosts: Count | None = None
    hosts: list[str] | None = None


class SparesShape(Struct):
    ready: Count
    wanted: Count
    preparing: Count


class BackupShape(Struct):
    held: Count
    bytes: Count
    starts: Count
    pid: Count | None
    wanted: Count | None


class ContextCopiesShape(Struct):
    covered_tokens: Count
    lag_tokens: Count
    bytes: Count
    room_tokens: Count


class HeldShape(Struct):
    name: str
    size: Count


class StatusShape(Struct):
    phase: str
    epoch: Count
    ranks: dict[int, RankShape]
    active: list[Count] = []
    reason: str | None = None
    waiting_for: str | None = None
    last_rejection: str | None = None
    fewest_ranks: Count | None = None
    open_requests: Count | None = None
    masked_experts: Count | None = None
    uncovered_experts: Count | None = None
    draining: bool = False
    other_hosts: dict[str, list[Count]] | None = None
    change: ChangesShape | None = None
    operations: list[RunningOperation] | None = None
    margin: MarginShape | None = None
    spares: SparesShape | None = None
    backup: BackupShape | None = None
    context_copies: ContextCopiesShape | None = None
    anchored: list[HeldShape] | None = None


class OperationShape(Struct):
    state: str
    reason: str
    undone: list[str]


class EvidenceShape(Struct):
    reaction: str
    ranks: list[Count]
