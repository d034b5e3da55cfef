"""A whole drill: a server with four ranks, a mixed load, faults at random, and a result as a document.

It passes if no request failed, no token was wrong, no rank was lost that was left alone, the server never stood still without
a reason, every rank is back at the end and nothing is left over. In bfloat16 an answer depends on what else is in its batch,
so there the share of answers that stayed the same is told beside that of a control without faults, and only lengths are
checked.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from eep.drill.devices import DEVICES, Device
from eep.drill.mixed_load import MixedLoad
from eep.drill.models.checkpoint import make_model
from eep.drill.query_answers import Answer, first_difference
from eep.drill.random_faults import FaultMix, RandomFaults, stops_of
from eep.drill.references import References, agreement, learn
from eep.drill.request_mix import REQUEST_MIXES, RequestMix, make_queries
from eep.drill.sglang_server import FOUR_RANKS, Server
from eep.drill.silences import LONGEST, find_silences
from eep.drill.step_search import find_bad_steps, read_steps
from eep.drill.story import Story
from eep.drill.unasked_losses import find_unasked

RANKS = 4
_SHOWN = 20
"""How many wrong or failed answers a result tells in full."""
_BROUGHT = re.compile(r" has (\d+) of \d+ tokens from ")
_COMPUTED = " is computed again, "
"""As the ranks say it in the log (``sglang_patches/rank/kv/report.py``)."""
_STEADY_FIRST = 2.0
"""Seconds of load before the first fault."""


@dataclass(frozen=True)
class DrillPlan:
    """Everything that decides a drill. The same plan gives the same load and the same plan of faults."""

    device: str = "cpu"
    seconds: float = 60.0
    """How long faults come. 0: none, only load."""
    steady: float = 5.0
    """Seconds of load without faults, before them."""
    seed: int = 1
    clients: int = 16
    dtype: str = "float32"
    fp8: bool = False
    """Experts in blocks of fp8, tokens cross ranks in it."""
    spares: int = 1
    overlap: bool = True
    prefix_cache: bool = True
    redundant_experts: int = 48
    """48: every rank holds every expert of the small models, so that the last rank can serve."""
    mix: RequestMix | None = None
    """None: that of the device."""
    fault_mix: FaultMix = field(default_factory=FaultMix)
    flags: tuple[str, ...] = ()
    """More flags for the server."""
    records_steps: bool = False
    """The ranks write down what is in each of their batches, so that the result names the step of a wrong token."""

    needs_contexts: bool = False
    """The drill passes only if contexts of lost ranks came along to others."""

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(f"there is no device {self.device!r}: choose from {', '.join(DEVICES)}")
        for name, least in (("seconds", 0), ("steady", 0), ("clients", 1), ("spares", 0), ("redundant_experts", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def exact(self) -> bool:
        """Whether tokens can be compared: only in float32 do they not depend on what else is in the batch."""
        return self.dtype == "float32" and not self.fp8


def run_drill(plan: DrillPlan, place: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Starts a server in ``place``, drills it and ends it; the result. RuntimeError if there is nothing to drill."""
    device = _prepared(plan, DEVICES[plan.device])
    with device.prepared() as needed:
        say("making a small random model, and starting SGLang with four ranks; this takes about a minute")
        model = make_model(place / "model", size=device.model, fp8=plan.fp8)
        steps = place / "steps" if plan.records_steps else None
        environment = {**needed, **({} if steps is None else {"EEP_STEP_RECORD": str(steps)})}
        server = Server(model, _arguments(plan), place / "server.log", environment, place / "d", device)
        with server:
            result = drill_server(plan, server.url, place / "d", say, steps)
            result["log"] = {"moved": server.log.count("replaying "), **_contexts(server.log)}
        result["left_over"] = server.leftovers()
    result["passed"] = not _complaints(result)
    for complaint in _complaints(result):
        say(complaint)
    return result


def drill_server(
    plan: DrillPlan, url: str, directory: Path, say: Callable[[str], None], steps: Path | None = None
) -> dict[str, Any]:
    """Drills a server that runs, and tells what came of it. ``directory`` is the supervisor's private one; in ``steps`` the
    ranks write down their batches."""
    queries = make_queries(plan.mix or REQUEST_MIXES[plan.device], plan.seed)
    known = learn(url, queries, plan.clients, exact=plan.exact, say=say)
    if not known.usable:
        raise RuntimeError(f"no answer of {len(queries)} can be compared: {dict(known.left_out)}")
    control = None if plan.exact else agreement(url, known.usable, plan.clients)
    load = MixedLoad(url, known.usable, plan.clients, plan.seed, exact=plan.exact)
    story = Story(directory, load, say=lambda text: None)
    faults = RandomFaults(story.target, plan.fault_mix, plan.seed, say)
    try:
        story.wait_until_all_run(RANKS)
        began = time.monotonic()
        say(f"{plan.clients} clients ask for {len(known.usable)} different answers")
        with load:
            time.sleep(max(plan.steady, _STEADY_FIRST))
            faults.run(plan.seconds)
            all_back = story.wait_until_all_run(RANKS)
            time.sleep(_STEADY_FIRST)
        ended = time.monotonic()
    finally:
        story.close()
    return {
        "machine": describe_machine(plan.device),
        "plan": asdict(plan),
        "references": _told_references(known),
        "rank_seconds": round(RANKS * (ended - began), 1),
        "requests": len(load.answers),
        "by_kind": load.by_kind(),
        "cut_by_clients": sum(answer.is_cut for answer in load.answers),
        "failed": [_told(load, answer, began) for answer in load.failed[:_SHOWN]],
        "failed_count": len(load.failed),
        "wrong": [_told(load, answer, began) for answer in load.wrong[:_SHOWN]],
        "wrong_count": len(load.wrong),
        "bad_steps": []
        if steps is None
        else [asdict(step) for step in find_bad_steps(read_steps(steps), [*known.bad_places, *_wrong(load)])],
        "alike": None if plan.exact else {"under_faults": load.alike(), "control": control},
        "faults": [{**asdict(fault), "at": round(fault.at - began, 3)} for fault in faults.done],
        "faults_by_kind": dict(Counter(fault.kind for fault in faults.done)),
        "lost_unasked": find_unasked(
            [view for at, view, _ in story.views if at <= ended],
            {life for fault in faults.done for life in fault.ranks},
        ),
        "largest_gap_ms": round(1000 * load.largest_gap(began, ended), 1),
        "silences": [
            {"at": round(each.at - began, 3), "seconds": round(each.seconds, 3), "epoch": each.epoch}
            for each in find_silences(
                load.token_times(), story.views, stops_of(faults.done), began, ended, LONGEST[plan.device]
            )
        ],
        "all_back": all_back,
        "epoch": story.views[-1][1].epoch if story.views else None,
    }


def describe_machine(device: str) -> dict[str, Any]:
    """What it was run on."""
    import torch

    gpu = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else None
    versions = {name: importlib.metadata.version(name) for name in ("eep", "sglang", "torch")}
    return {"cpus": os.cpu_count(), "machine": platform.machine(), "gpu": gpu, **versions}


def _prepared(plan: DrillPlan, device: Device) -> Device:
    """The device with the flags of this plan: SGLang takes the last of those that are given twice."""
    wanted = device.caching() if plan.prefix_cache else device
    return replace(wanted, flags=(*wanted.flags, "--dtype", plan.dtype))


def _arguments(plan: DrillPlan) -> tuple[str, ...]:
    roomy = {
        # Prompts of several chunks, and caches that hold the prompts of all clients.
        "cuda": ("--max-total-tokens", "40960", "--max-running-requests", "256", "--chunked-prefill-size", "2048"),
        "cpu": ("--chunked-prefill-size", "512", "--max-running-requests", "64"),
    }[plan.device]
    return (
        *FOUR_RANKS,
        *roomy,
        *("--eep-timeout-ms", "20000", "--eep-faults", "on", "--eep-spares", str(plan.spares)),
        *("--eep-redundant-experts", str(plan.redundant_experts)),
        *(() if plan.overlap else ("--disable-overlap-schedule",)),
        *plan.flags,
    )


def _contexts(log: str) -> dict[str, int]:
    """What became of the contexts of requests that moved, by the log of a server."""
    brought = [int(tokens) for tokens in _BROUGHT.findall(log)]
    return {"contexts": len(brought), "context_tokens": sum(brought), "contexts_computed": log.count(_COMPUTED)}


def _complaints(result: dict[str, Any]) -> list[str]:
    """Why a drill has not passed."""
    told = [
        (result["failed_count"], f"{result['failed_count']} requests failed"),
        (result["wrong_count"], f"{result['wrong_count']} answers were wrong"),
        (result["references"]["unsteady"], "greedy answers differed without any fault"),
        (result["lost_unasked"], f"ranks were lost that were left alone (rank, life): {result['lost_unasked']}"),
        (not result["all_back"], "not all ranks came back"),
        (result["silences"], f"no client heard anything although ranks ran: {result['silences']}"),
        (result["left_over"], f"left over: {result['left_over']}"),
        (
            result["plan"]["needs_contexts"] and not result["log"]["contexts"],
            f"no context of a lost rank came along; {result['log']['contexts_computed']} were computed again",
        ),
    ]
    return [text for is_so, text in told if is_so]


def _told_references(known: References) -> dict[str, Any]:
    return {
        "usable": len(known.usable),
        "left_out": dict(known.left_out),
        "unsteady": known.unsteady,
        "prompts_over_1000": sum(len(each.query.prompt) > 1000 for each in known.usable),
    }


def _wrong(load: MixedLoad) -> list[tuple[str, int]]:
    """The names of requests with a wrong token, and the place of the first one."""
    places = ((answer.name, first_difference(load.wanted_of(answer), answer)) for answer in load.wrong)
    return [(name, place) for name, place in places if name and place is not None]


def _told(load: MixedLoad, answer: Answer, began: float) -> dict[str, Any]:
    wanted = load.wanted_of(answer)
    place = first_difference(wanted, answer)
    texts = {} if wanted.text == answer.text else {"text": answer.text, "wanted_text": wanted.text}
    return {
        **texts,
        "query": answer.prompt,
        "kind": load.kind_of(answer),
        "began": round(answer.started - began, 3),
        "what": answer.problem or load.what_is_wrong(answer),
        "place": place,
        "at": round(answer.times[place] - began, 3) if place is not None and place < len(answer.times) else None,
    }
