"""What an operation does next, from where the instance stood when it began and stands now. Pure.

An operation is a row of orders to the supervisor or the front end. Each follows from what is seen, not from what was hoped
for: an operation that is asked for again after a crash of its client begins where the instance is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from eep.operations.instance_standing import InstanceStanding
from eep.operations.operation_request import OF_A_RANK, OperationRequest, RoleName

FAILURES_OF_A_START = 3
"""So many failures in a row of a rank that an operation started end the operation."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be done now. ``rank`` is -1 for the orders ``drain`` and ``undrain``. The orders ``experts`` and ``both``
    give a rank that role."""

    action: str
    rank: int = -1

    def __str__(self) -> str:
        return self.action if self.rank < 0 else f"{self.action} {self.rank}"


@dataclass(frozen=True, slots=True)
class OrdersWait:
    reason: str


@dataclass(frozen=True, slots=True)
class OrdersDone:
    reason: str


@dataclass(frozen=True, slots=True)
class OrdersFailed:
    """``retry``: whether asking again, under another id, may help."""

    reason: str
    retry: bool


NextStep = Order | OrdersWait | OrdersDone | OrdersFailed


def why_refused(request: OperationRequest, now: InstanceStanding) -> OrdersFailed | None:
    """Why an operation is not even begun; None if it may be."""
    if request.action in OF_A_RANK and request.rank not in now.ranks:
        return OrdersFailed(_why_no_rank(request, now), retry=False)
    if request.action == "drill" and not now.faults_allowed:
        return OrdersFailed("this server was not started with --eep-faults on", retry=False)
    if request.action in ("kill", "drill") and request.rank is not None and not now.ranks[request.rank].is_in:
        return OrdersFailed(f"rank {request.rank} is not in; it is {now.ranks[request.rank].status}", retry=True)
    if request.action == "scale" and request.ranks is not None:
        if request.ranks > len(now.ranks):
            return OrdersFailed(_why_no_room(now), retry=False)
        if request.ranks < now.needed:
            return OrdersFailed(_why_too_few(now), retry=False)
    if request.action == "remove" and request.rank in now.kept and len(now.kept) <= now.needed:
        why = f"{len(now.kept) - 1} ranks{_here(now)} would serve or come back, and it takes {now.needed}"
        return OrdersFailed(f"rank {request.rank} cannot be taken out: {why}", retry=True)
    if request.action in ("remove", "replace") and request.rank in now.active:
        stay = [rank for rank in now.active if rank != request.rank and now.ranks[rank].is_kept]
        if len(stay) < now.needed:
            why = f"{len(stay)} ranks{_here(now)} would stay, and it takes {now.needed}"
            return OrdersFailed(f"rank {request.rank} cannot be taken out: {why}", retry=True)
        if now.is_last_to_serve(_rank_of(request)):
            why = "no rank that serves requests would stay ('eep rank role R both' makes one)"
            return OrdersFailed(f"rank {request.rank} cannot be taken out: {why}", retry=True)
    if request.role == "experts" and now.is_last_to_serve(_rank_of(request)):
        why = "no other rank that serves requests is in"
        return OrdersFailed(f"rank {request.rank} cannot serve experts only: {why}", retry=True)
    return None


def _why_no_rank(request: OperationRequest, now: InstanceStanding) -> str:
    if now.elsewhere is None:
        return f"there is no rank {request.rank}; there are ranks 0 to {len(now.ranks) - 1}"
    return f"rank {request.rank} is not of this host, which has ranks {sorted(now.ranks)}; ask the server of its host"


def _why_no_room(now: InstanceStanding) -> str:
    if now.elsewhere is None:
        return f"there is room for {len(now.ranks)} ranks; for more start the server with a larger --eep-max-ranks"
    return f"this host has room for {len(now.ranks)} ranks; for more start a server on another host"


def _why_too_few(now: InstanceStanding) -> str:
    if now.elsewhere is None:
        return f"{now.fewest_ranks} ranks are needed to hold every expert"
    needed = f"{now.needed} ranks of this host are needed: it takes {max(1, now.fewest_ranks)} to hold every expert"
    return f"{needed}, and {now.elsewhere} of other hosts are in; to take out a whole host, drain it and end its server"


def _here(now: InstanceStanding) -> str:
    return "" if now.elsewhere is None else " of this host"


def next_step(
    request: OperationRequest, origin: InstanceStanding, now: InstanceStanding, given: tuple[Order, ...]
) -> NextStep:
    """``origin``: how the instance stood when the operation began; ``given``: the orders so far."""
    match request.action:
        case "remove":
            return _remove(_rank_of(request), now, given)
        case "launch":
            return _launch(_rank_of(request), now, given)
        case "replace":
            return _replace(_rank_of(request), origin, now, given)
        case "kill" | "drill":
            return _kill(request.action, _rank_of(request), origin, now, given)
        case "role":
            return _role(_rank_of(request), request.role or "both", now, given)
        case "scale":
            return _scale(request.ranks or 0, now, given)
        case "drain":
            if not given:
                return Order("drain")
            if not now.draining:
                return OrdersFailed("requests are accepted again: another operator has ended the drain", retry=True)
            if now.open_requests:
                return OrdersWait(f"{now.open_requests} requests are open")
            return OrdersDone("no request is open, and none is accepted")
        case "undrain":
            return Order("undrain") if now.draining and not given else OrdersDone("requests are accepted")


def undo(
    request: OperationRequest, origin: InstanceStanding, now: InstanceStanding, touched: Collection[int]
) -> tuple[Order, ...]:
    """The orders that bring the instance back to what it was when an operation that failed began. ``touched``: the ranks that
    it gave orders for. What became of others is not its doing."""
    if request.action == "drain":
        return (Order("undrain"),) if now.draining and not origin.draining else ()
    if request.action == "role":
        rank, before = _rank_of(request), origin.ranks[_rank_of(request)].role
        return (Order(before, rank),) if now.ranks[rank].role == request.role != before else ()
    if request.action in ("kill", "drill", "undrain"):
        return ()
    gone = [Order("launch", rank) for rank in origin.kept if rank in touched and rank not in now.kept]
    new = [Order("remove", rank) for rank in now.kept if rank in touched and rank not in origin.kept]
    return (*gone, *new)


def must_wait(order: Order, now: InstanceStanding) -> OrdersWait | None:
    """Whether it is too early for an order. A rank that is launched while it ends would not come again."""
    if order.action != "launch" or now.ranks[order.rank].wanted or now.ranks[order.rank].status in ("down", "stuck"):
        return None
    return OrdersWait(f"rank {order.rank} is {now.ranks[order.rank].status}")


def effect_of(order: Order, now: InstanceStanding) -> OrdersWait | OrdersDone | OrdersFailed:
    """What came of an order that took something back. The others may still settle."""
    standing = now.ranks.get(order.rank)
    if standing is None or order.action not in ("remove", "launch"):
        return OrdersDone("at once")
    if order.action == "remove" and standing.status == "down" and not standing.is_in:
        return OrdersDone(f"rank {order.rank} is out")
    if order.action == "launch":
        if standing.is_in and standing.is_kept:
            return OrdersDone(f"rank {order.rank} is in")
        if (failed := _why_start_failed((order.rank,), now)) is not None:
            return failed
    return OrdersWait(f"rank {order.rank} is {standing.status}")


def _rank_of(request: OperationRequest) -> int:
    assert request.rank is not None  # check_request has seen to it
    return request.rank


def _remove(rank: int, now: InstanceStanding, given: tuple[Order, ...]) -> NextStep:
    if Order("remove", rank) not in given and now.ranks[rank].is_kept:
        return Order("remove", rank)
    if not now.ranks[rank].is_in and now.ranks[rank].status == "down":
        return OrdersDone(f"rank {rank} is out") if now.phase == "RUN" else OrdersWait("the others settle")
    return OrdersWait(f"rank {rank} is {now.ranks[rank].status}")


def _launch(rank: int, now: InstanceStanding, given: tuple[Order, ...]) -> NextStep:
    standing = now.ranks[rank]
    if standing.is_in and standing.is_kept:
        return OrdersDone(f"rank {rank} is in") if now.phase == "RUN" else OrdersWait("the ranks settle")
    if Order("launch", rank) not in given:
        return must_wait(Order("launch", rank), now) or Order("launch", rank)
    return _why_start_failed((rank,), now) or OrdersWait(f"rank {rank} is {standing.status}")


def _why_start_failed(ranks: tuple[int, ...], now: InstanceStanding) -> OrdersFailed | None:
    for rank in ranks:
        standing = now.ranks[rank]
        if standing.failures >= FAILURES_OF_A_START or standing.status in ("down", "stuck"):
            why = f"rank {rank} failed {standing.failures} times in a row and is {standing.status}"
            return OrdersFailed(f"{why}; its output in the server's log says why", retry=False)
    return None


def _replace(rank: int, origin: InstanceStanding, now: InstanceStanding, given: tuple[Order, ...]) -> NextStep:
    is_another = now.ranks[rank].incarnation > origin.ranks[rank].incarnation
    if not origin.ranks[rank].is_in or is_another or Order("launch", rank) in given:
        return _launch(rank, now, given)
    gone = _remove(rank, now, given)
    return Order("launch", rank) if isinstance(gone, OrdersDone) else gone


def _kill(
    action: str, rank: int, origin: InstanceStanding, now: InstanceStanding, given: tuple[Order, ...]
) -> NextStep:
    if not given:
        return Order(action, rank)
    standing = now.ranks[rank]
    if standing.is_in and standing.incarnation > origin.ranks[rank].incarnation and now.phase == "RUN":
        return OrdersDone(f"rank {rank} is back")
    if standing.status in ("down", "stuck") and standing.incarnation >= origin.ranks[rank].incarnation:
        return OrdersFailed(f"rank {rank} is {standing.status}, and is not started again", retry=False)
    return OrdersWait(f"rank {rank} is {standing.status}")


def _role(rank: int, role: RoleName, now: InstanceStanding, given: tuple[Order, ...]) -> NextStep:
    standing = now.ranks[rank]
    if standing.role != role:
        if given:  # the front end forgets no role: another operator has changed it back
            return OrdersFailed(f"rank {rank} has got another role meanwhile", retry=True)
        return Order(role, rank)
    if role == "both":
        return OrdersDone(f"rank {rank} serves requests and experts")
    if standing.requests:
        return OrdersWait(f"rank {rank} still serves {standing.requests} requests")
    return OrdersDone(f"rank {rank} serves experts only")


def _scale(wanted: int, now: InstanceStanding, given: tuple[Order, ...]) -> NextStep:
    started = tuple(order.rank for order in given if order.action == "launch")
    failed = _why_start_failed(tuple(rank for rank in started if not now.ranks[rank].is_in), now)
    if failed is not None:
        return failed
    if len(now.kept) < wanted:
        free = [rank for rank, standing in sorted(now.ranks.items()) if standing.status == "down"]
        untried = [rank for rank in free if rank not in started]
        if untried:
            return Order("launch", untried[0])
        return OrdersWait(f"{len(now.kept)} of {wanted} ranks serve or start; the others are still ending")
    if len(now.kept) > wanted:
        if now.phase != "RUN" or any(rank not in now.kept for rank in now.active):
            return OrdersWait("a rank leaves")  # one at a time: each finds the others settled
        return Order("remove", _first_to_go(now))
    return (
        OrdersDone(f"{wanted} ranks serve")
        if now.is_quiet
        else OrdersWait(f"{len(now.active)} of {wanted} ranks serve")
    )


def _first_to_go(now: InstanceStanding) -> int:
    """One that serves nothing yet, or else one that can go without a repair; of several, the last. Never the last that serves
    requests."""
    outside = [rank for rank in now.kept if not now.ranks[rank].is_in]
    may_go = [rank for rank in now.kept if not now.is_last_to_serve(rank)] or now.kept
    safe = [rank for rank in may_go if rank in now.safe]
    return max(outside or safe or may_go)
