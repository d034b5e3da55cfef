"""A server that moves its experts back to where they were when the bench says so, and what its ranks do meanwhile.

This file is an SGLang plugin of its own, which :class:`~bench.common.server_switch.ServerSwitch` puts beside one server. The
switch says where experts are to be: at 0 as they were first, at 1 as the balancer wants them. In both cases they move as
they always do: the first rank proposes, all stage, all switch. Every rank adds up what it does in its MoE layers. The thread
of its steps stays on one core: SGLang binds ranks to theirs only where its own kernels for CPUs are installed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.balance.added_work import write_work
from bench.common.server_switch import find_switch

MODULE = "bench.balance.placement_switch"
AS_FIRST, EVEN = 0, 1
_ASKS_EVERY = 8
"""Steps between two questions whether all have staged. A server asks less often: no client waits for experts to move."""
_STATE = "placement.json"


@dataclass(frozen=True)
class PlacementState:
    """What the first rank says: the position of the switch that it has seen, whether experts are where they were first, how
    often they have moved, and how many looks have passed since."""

    position: int
    is_first: bool
    doses: int
    looks: int


def register() -> None:
    """In every process of the server."""
    found = find_switch()
    if found is not None:
        switch, folder = found
        _ask_often()
        _count_work(folder)
        _steer(switch, folder)


def read_state(folder: Path) -> PlacementState | None:
    """None before the first look."""
    path = folder / _STATE
    return PlacementState(**json.loads(path.read_text())) if path.exists() else None


def _ask_often() -> None:
    from eep.experts.balancing.balance_turns import BalanceTurns

    begin = BalanceTurns.__init__

    def begun(turns: BalanceTurns, session: Any, words: Any, balancer: Any) -> None:
        begin(turns, session, words, balancer, _ASKS_EVERY)

    BalanceTurns.__init__ = begun  # type: ignore[method-assign,assignment]


def _steer(switch: Any, folder: Path) -> None:
    from eep.experts.balancing.leader import Leader
    from eep.experts.placement.slot_plan import Placement
    from eep.experts.standing import Standing

    lead = Leader.lead
    first: list[Placement] = []
    seen = {"doses": 0, "looks": 0, "looked": 0}

    def steered(leader: Leader, standing: Standing, steps: int) -> None:
        position, base = switch[0], standing.base
        first.extend([base.placement] if not first else [])
        asked = leader._policy
        if position == AS_FIRST:
            leader._policy = replace(asked, least=0.0)  # it looks, and proposes nothing
        lead(leader, standing, steps)
        leader._policy = asked
        is_first = base.placement.digest == first[0].digest
        is_proposed = leader._proposed is not None and leader._proposed[0] is standing
        if position == AS_FIRST and not is_first and not is_proposed and leader._asked is not None:
            record = base.renewed(first[0], leader._asked.load, base.doses + 1)
            leader._log.propose(standing.next_name, 0, record)
            leader._proposed = (standing, 0, time.monotonic())
        if base.doses != seen["doses"] or is_proposed:
            seen.update(doses=base.doses, looks=0)
        seen["looks"] += leader._looked != seen["looked"]
        seen["looked"] = leader._looked
        fresh = folder / f"{_STATE}.new"
        fresh.write_text(
            json.dumps({"position": position, "is_first": is_first, "doses": base.doses, "looks": seen["looks"]})
        )
        fresh.rename(folder / _STATE)

    Leader.lead = steered  # type: ignore[method-assign,assignment]


def _count_work(folder: Path) -> None:
    """``rows``: tokens of this rank, once for each layer; ``picks``: what its experts computed; ``experts``: processor time
    for that; ``waits``: by the clock, in exchanges with the other rank."""
    from eep.experts.balancing.balancer import Balancer
    from sglang_patches.rank.dispatcher import TokenExchange

    done = {"rows": 0.0, "picks": 0.0, "experts": 0.0, "waits": 0.0}
    began = [0.0]
    make, receive, combine, count = (
        TokenExchange.__init__,
        TokenExchange.received,
        TokenExchange.combine,
        Balancer.stepped,
    )

    def waiting(work: Callable[..., Any], *arguments: Any) -> Any:
        since = time.perf_counter()
        try:
            return work(*arguments)
        finally:
            done["waits"] += time.perf_counter() - since

    def made(exchange: TokenExchange, plane: Any, x: Any, routed: Any) -> None:
        done["rows"] += int((routed.slots >= 0).any(dim=1).sum())
        waiting(make, exchange, plane, x, routed)

    def received(exchange: TokenExchange, router_logits: Any) -> Any:
        output = receive(exchange, router_logits)
        done["picks"] += int((output.topk_output.topk_ids >= 0).sum())
        began[0] = time.thread_time()
        return output

    def combined(exchange: TokenExchange, y: Any) -> Any:
        done["experts"] += time.thread_time() - began[0]
        return waiting(combine, exchange, y)

    def stepped(balancer: Balancer) -> None:
        if not balancer._steps:
            os.sched_setaffinity(0, {balancer._rank % (os.cpu_count() or 1)})
        count(balancer)
        write_work(folder, {"steps": balancer._steps, "at": time.perf_counter(), **done})

    patched: dict[type, dict[str, Callable[..., Any]]] = {
        TokenExchange: {"__init__": made, "received": received, "combine": combined},
        Balancer: {"stepped": stepped},
    }
    for owner, methods in patched.items():
        for name, method in methods.items():
            setattr(owner, name, method)
