"""What does a kill cost requests with long contexts, when they are restored and when they are computed again?

Starts the real SGLang server with four ranks. For each kill some clients stream a long answer to a prompt of N tokens each,
no two alike, and others beside them ask short prompts. In mid-answer one rank gets SIGKILL. Of every kill: the largest gap
between tokens of the long requests that the rank had, of its short ones, and of the requests of other ranks; and how many
tokens of contexts were restored from the memory of the lost rank, and how many were computed again. Lengths take turns on
one server, and so do the ways: contexts restored, as they are by default, restored from the copy in host memory, if there is
one (--kv-backup), and restoring switched off (see bench/context/restore_switch.py). In float32 every token is compared with
that of a fault-free answer. In bfloat16 an answer depends on what else is in its batch, so there it is told how many differ.

The longer the prompts, the fewer clients have one; the rank that is killed always has at least one.

On a GPU ranks have spares. With one for each rank (--spares 4) a kill waits until all are ready. With two (--spares 8) it
waits for the spares of those ranks that were not killed of late, so that kills come faster and meet spares that are being
prepared.

Writes context-DEVICE.json, .md and .png; if it is interrupted, if --seconds are over, or if a rank does not come back, of the
kills that are over. A kill that came after the end of all long answers of its rank is told and left out: ask for more
--tokens. The exit code is 0 only if all kills were done, no request failed, no token was wrong, contexts were restored, and
nothing was left over.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.common.provenance import provenance
from bench.common.result_files import write_results
from bench.context.clients import SHORT, Known, LongClients, count_tokens, flush, learn
from bench.context.command_line import parse
from bench.context.pauses import NothingMoved, Pauses, measure
from bench.context.plan import PREFILL, RANKS, RESTORED, Turn, count_long, plan
from bench.context.report import complaints, page, plot, summary, why_computed
from bench.context.restore_switch import Switch
from bench.failover.kills import kill_now, need_spares
from eep.drill.devices import DEVICES, Device
from eep.drill.load import Load
from eep.drill.models.checkpoint import make_model
from eep.drill.query_answers import Answer
from eep.drill.sglang_server import FOUR_RANKS, Server
from eep.drill.story import Story

SHORT_PROMPTS, SHORT_TOKENS = 8, 24
CHUNK = 2048
"""Tokens that a rank prefills in a step: what SGLang's default of 8192 comes to with four ranks."""
_SPARE_TOKENS = 4096
"""Room in the cache of a rank beside long requests."""
_TOLD = ("device", "dtype", "contexts", "kills", "restored", "spares", "long", "short", "tokens", "seed")
"""Options that the setting of a run repeats."""
_TO_LEARN = 0.5
"""Of --seconds: when this share is over, no further length is begun with."""


@dataclass
class Outcome:
    """What the kills have shown so far."""

    kills: list[Pauses] = field(default_factory=list)
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    ended_by: str = ""
    """What went wrong with the server or a client, so that no further kill was done."""

    def add(self, turn: Turn, long: LongClients, short: Load) -> None:
        self.answered += len(long.answers) + len(short.answers)
        self.failed += [answer.problem for answer in (*long.failed, *short.failed)]
        self.wrong += [_told(turn, "long", answer) for answer in long.wrong]
        self.wrong += [_told(turn, "short", answer) for answer in short.wrong]


def main() -> int:
    options = parse(__doc__)
    gc.disable()  # or the clients stand still at times, while it looks through the answers that there are
    device = DEVICES[options.device].caching()
    device = replace(device, flags=(*device.flags, "--dtype", options.dtype))
    with tempfile.TemporaryDirectory(prefix="eep-bench-") as place, device.prepared() as needed:
        results, kills = run(options, Path(place), device, needed)
    text = page(results)
    print(text, flush=True)
    if not options.no_files:
        write(options, results, kills, text)
    return int(bool(results["complaints"]))


def run(
    options: argparse.Namespace, place: Path, device: Device, needed: dict[str, str]
) -> tuple[dict[str, Any], list[Pauses]]:
    end = time.monotonic() + options.seconds
    load_before = round(os.getloadavg()[0], 2)
    results: dict[str, Any] = provenance()  # before anything runs: the commit is the one that is measured
    switch = Switch(place / "switch")
    arguments = server_arguments(
        options.contexts, options.long, options.tokens, spares=options.spares if device.shared else 0
    )
    arguments += ("--eep-kv-backup", options.kv_backup) if options.kv_backup else ()
    context = max(options.contexts) + 2 * options.tokens
    say("making a small random model, and starting SGLang with four ranks; this takes about a minute")
    server = Server(
        make_model(place / "model", size=device.model, context=context),
        arguments,
        place / "server.log",
        {**needed, **switch.environment()},
        place / "d",
        device,
    )
    with server:
        outcome = kill_in_turns(options, server, switch, end)
    results["setting"] = {
        **{name: getattr(options, name) for name in _TOLD},
        "clients_with": {context: count_long(context, options.long) for context in options.contexts},
        "sglang": importlib.metadata.version("sglang"),
        "server": [*device.flags, *arguments],
        "ranks": RANKS,
        "kill_after": options.tokens // 4,
        "chunk": CHUNK,
        "note": options.note,
        "load_average": [load_before, round(os.getloadavg()[0], 2)],
    }
    results["requests"] = {
        "answered": outcome.answered,
        "failed": len(outcome.failed),
        "wrong": len(outcome.wrong),
    }
    results |= {"problems": outcome.failed[:20], "wrong": outcome.wrong[:20], "why_computed": why_computed(server.log)}
    results |= {"left_over": server.leftovers(), "cells": summary(outcome.kills)}
    results["kills"] = [asdict(kill) for kill in outcome.kills]
    results["ended_by"] = outcome.ended_by
    results["complaints"] = complaints(results)
    return results, outcome.kills


def server_arguments(contexts: Sequence[int], long: int, tokens: int, spares: int) -> tuple[str, ...]:
    """A cache has room for what a rank serves and, if all of it goes there, what another had. ``spares``: on a GPU a rank
    takes seconds to come back without one."""
    room = max(2 * -(-count_long(each, long) // RANKS) * (each + tokens) for each in contexts) + _SPARE_TOKENS
    return (
        *FOUR_RANKS,
        # Patience with ranks that share their cores: only deaths are measured here.
        *("--eep-timeout-ms", "20000", "--eep-spares", str(spares)),
        *("--incremental-streaming-output", "--enable-metrics"),
        *("--max-total-tokens", str(room)),
        # SGLang shares this among the ranks.
        *("--chunked-prefill-size", str(CHUNK * RANKS), "--max-prefill-tokens", str(CHUNK * RANKS)),
    )


def learn_all(
    options: argparse.Namespace, url: str, choose: random.Random, end: float
) -> tuple[Known, dict[int, Known]]:
    """The fault-free answers to short prompts, and to long ones of each length for which there is time."""
    shared = {"ranks": RANKS, "continued": options.device == "cuda", "exact": options.dtype == "float32"}
    say("asking short prompts for their fault-free answers")
    short = learn(url, choose, SHORT_PROMPTS, SHORT, SHORT_TOKENS, **shared)
    known: dict[int, Known] = {}
    for context in options.contexts:
        if known and time.monotonic() > end - (1 - _TO_LEARN) * options.seconds:
            say(f"there is no time for contexts of {context} tokens")
            break
        count, began = count_long(context, options.long), time.monotonic()
        known[context] = learn(url, choose, count, (context, context), options.tokens, **shared)
        say(
            f"{count} prompts of {context} tokens have their fault-free answers, after {time.monotonic() - began:.1f} s"
        )
    return short, known


def kill_in_turns(options: argparse.Namespace, server: Server, switch: Switch, end: float) -> Outcome:
    """All kills that begin before ``end``. When something breaks, or when interrupted, it gives those that are over, if
    there are any: they took minutes."""
    assert server.directory is not None
    outcome, choose = Outcome(), random.Random(options.seed)
    short, known = learn_all(options, server.url, choose, end)
    story = Story(server.directory, Load(server.url, [], [], clients=0), say=lambda text: None)
    turns = plan(list(known), options.ways, options.kills, RANKS, options.seed, options.restored)
    try:
        for number, turn in enumerate(turns, 1):
            if time.monotonic() > end:
                say(f"the time is over after {len(outcome.kills)} of {len(turns)} kills")
                break
            try:
                pauses = kill_once(options, server.url, story, switch, turn, known[turn.context], short, outcome)
            except NothingMoved as error:
                say(f"kill {number:2} of {len(turns)} is left out: {error}")
                continue
            say(
                f"kill {number:2} of {len(turns)}: {turn.context:6} tokens, {turn.way:8}: pause of {pauses.moved_requests} "
                f"moved {1000 * pauses.moved:.0f} ms, of others {1000 * pauses.others:.0f} ms, usual "
                f"{1000 * pauses.usual:.0f} ms; {pauses.restored_tokens} tokens restored, {pauses.recomputed_tokens} not"
            )
    except KeyboardInterrupt:
        if not outcome.kills:
            raise
        say(f"interrupted after {len(outcome.kills)} of {len(turns)} kills")
    except (RuntimeError, TimeoutError) as error:
        if not outcome.kills:
            raise
        outcome.ended_by = str(error)
        say(f"ended after {len(outcome.kills)} of {len(turns)} kills: {error}")
    finally:
        story.close()
    return outcome


def wait_for(spares: int) -> int:
    """How many spares must be ready before a kill. Where ranks have several, those that were killed last may lack one each:
    the next victim is none of them."""
    return spares if spares == RANKS else spares - (RANKS - 1)


def kill_once(
    options: argparse.Namespace,
    url: str,
    story: Story,
    switch: Switch,
    turn: Turn,
    known: Known,
    short: Known,
    outcome: Outcome,
) -> Pauses:
    if not story.wait_until_all_run(RANKS):
        raise RuntimeError("not all ranks run, before a kill")
    if DEVICES[options.device].shared:
        need_spares(story.target, wait_for(options.spares))
    flush(url)
    switch.set(restored=turn.way != PREFILL, caches=turn.way == RESTORED)
    before = count_tokens(url)
    with Load(url, short.prompts, short.wanted, options.short, ranks=RANKS) as beside:
        clients = LongClients(url, known, RANKS, first=turn.rank)
        clients.wait_for_tokens(options.tokens // 4)
        fault = kill_now(story, turn.rank)
        if not (story.wait_until_noticed(fault) and story.wait_until_all_run(RANKS)):
            raise RuntimeError(f"rank {turn.rank} was lost and did not come back")
        clients.join()
    restored, recomputed = (now - then for now, then in zip(count_tokens(url), before, strict=True))
    outcome.add(turn, clients, beside)
    pauses = measure(turn, fault, clients.answers, beside.answers, restored, recomputed)
    outcome.kills.append(pauses)
    return pauses


def _told(turn: Turn, kind: str, answer: Answer) -> dict[str, Any]:
    return {**asdict(turn), "kind": kind, "prompt": answer.prompt, "asked_of": answer.rank, "tokens": answer.tokens}


def write(options: argparse.Namespace, results: dict[str, Any], kills: Sequence[Pauses], text: str) -> None:
    name = options.results / f"context-{options.device}"
    subject = f"A rank of the SGLang server is killed under long contexts, {RANKS} ranks on {options.device}"
    write_results(name, results, text, lambda path: plot(path, kills, subject))


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
