"""Results of the bench of failover, for people and for programs: percentiles, a page, and pictures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common.comparison import phases_table, sum_up_phases, sum_up_turns, turns_table
from bench.common.phases import Phase
from bench.common.turns import Block
from bench.failover.kills import WINDOW, Kill
from eep.drill.story import Story
from eep.observe.timeline import ActiveRanks, Moment, draw_timeline, rates

TIMES = {
    "view": "view without the rank committed",
    "repaired": "all survivors run again",
    "first_token": "first token after that reaches a client",
    "rejoined": "the rank is back, all run",
}
PAUSES = {
    "pause": "at the kill",
    "pause_moved": "at the kill, of requests that the lost rank had",
    "pause_others": "at the kill, of the others",
    "pause_at_rejoin": "at the rejoin",
    "rejoining": "survivors at the rejoin, from the commit of the view until all run in it",
    "usual_gap": f"in the {WINDOW:g} s before a kill",
}
NAMES = ("elastic", "fixed")
"""The two ways that are compared."""
_AROUND = 3.0


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Milliseconds. By nearest rank, so each is a value that was measured; p99 of fewer than 100 is the largest."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return round(ordered[math.ceil(len(ordered) * share) - 1] * 1000, 1)

    return {"p50_ms": at(0.5), "p99_ms": at(0.99), "samples": len(ordered)}


def throughput(kills: Sequence[Kill]) -> dict[str, float]:
    """Tokens per second over all kills: before, from kill to rejoin, and after."""
    during = sum(kill.rejoined for kill in kills)
    return {
        "before": round(sum(kill.tokens_before for kill in kills) / (WINDOW * len(kills)), 1),
        "during": round(sum(kill.tokens_during for kill in kills) / during, 1),
        "after": round(sum(kill.tokens_after for kill in kills) / (WINDOW * len(kills)), 1),
    }


def summary(kills: Sequence[Kill], phases: Sequence[Phase], turns: Sequence[Block]) -> dict[str, Any]:
    return {
        "from_kill": {name: percentiles([getattr(kill, name) for kill in kills]) for name in TIMES},
        "largest_gap_between_tokens": {name: percentiles([getattr(kill, name) for kill in kills]) for name in PAUSES},
        "tokens_per_second": throughput(kills),
        "steady": sum_up_phases(phases, NAMES),
        "turns": sum_up_turns(turns, NAMES),
    }


def page(head: dict[str, Any], told: dict[str, Any]) -> str:
    """The results as Markdown."""
    machine, setting = head["machine"], head["setting"]
    times, gaps = told["from_kill"], told["largest_gap_between_tokens"]
    rate, level, turns = told["tokens_per_second"], told["steady"], told["turns"]
    lines = [
        f"# Failover of the real SGLang server, {setting['device']}",
        "",
        f"`{head['command']}`, commit {head['commit']}, {head['date']}.",
        f"{machine['gpu'] + ', ' if 'gpu' in machine else ''}{machine['cpu']}, {machine['cores']} cores, "
        f"load average {setting['load_average'][0]} before and "
        f"{setting['load_average'][1]} at the end; Python {machine['python']}, torch {machine['torch']}, "
        f"SGLang {setting['sglang']}.",
        f"{setting['ranks']} ranks, {setting['clients']} clients that stream {setting['tokens']} tokens per request, "
        f"{setting['kills']} kills (seed {setting['seed']}), every rank in turn, {setting['spares'] or 'no'} spares.",
        f"{setting['redundant_experts']} expert slots beyond the number of experts; {_brought_in(head['brought_in'])}.",
        "",
        f"{head['requests']['answered']} requests under kills, {head['requests']['failed']} failed, "
        f"{head['requests']['wrong']} with a wrong token.",
        "",
        "| milliseconds from SIGKILL until | p50 | p99 |",
        "|---|---:|---:|",
        *(f"| {text} | {times[name]['p50_ms']:.0f} | {times[name]['p99_ms']:.0f} |" for name, text in TIMES.items()),
        "",
        "| largest gap between tokens of any client, ms | p50 | p99 |",
        "|---|---:|---:|",
        *(f"| {text} | {gaps[name]['p50_ms']:.0f} | {gaps[name]['p99_ms']:.0f} |" for name, text in PAUSES.items()),
        "",
        f"With {setting['kills']} kills the p99 is the largest.",
        "",
        f"Tokens per second: {rate['before']:.0f} before, {rate['during']:.0f} from kill to rejoin, {rate['after']:.0f} "
        f"after (windows of {WINDOW:g} s; the processor that serves also starts the new rank).",
        "",
        f"Steady state, {level['pairs']} pairs of phases in turns, answers of up to {setting['steady_tokens']} tokens. "
        + (
            "All of them were elastic (`--alike`): this is what the comparison tells when there is nothing to tell."
            if setting["alike"]
            else "`bench/failover/fixed_membership.py` says what a membership that is taken for fixed leaves out."
        ),
        "",
        *phases_table(level, NAMES, ("elastic", "membership fixed")),
        "",
        f"The ranks alone, in turns of some {setting['turns']['turn']:g} s while every client streams an answer of "
        f"{setting['turns']['tokens']} tokens, {len(turns['of_each_block'])} blocks of four turns; each client gets a token "
        "in every step:",
        "",
        *turns_table(turns, NAMES),
    ]
    return "\n".join(lines) + "\n"


def _brought_in(told: dict[str, int]) -> str:
    sources = ", ".join(f"{size / 1024:.1f} MiB from {tier}" for tier, size in told.items() if tier != "experts")
    return f"ranks brought in {told['experts']} experts of a layer" + (f" ({sources})" if sources else "")


def plot(path: Path, story: Story, kills: Sequence[Kill], phases: Sequence[Phase], subject: str) -> None:
    """The whole run, the milestones of every kill, and the pairs of phases."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplot_mosaic([["run", "run"], ["kills", "steady"]], figsize=(11, 7), layout="constrained")
    end = kills[-1].at + kills[-1].rejoined + WINDOW
    where, rate = rates([moment - story.started for moment in story.load.token_times()], end, 0.5)
    axes["run"].step(where, rate, where="mid", color="#3182bd", linewidth=1)
    for kill in kills:
        axes["run"].axvspan(kill.at, kill.at + kill.rejoined, color="#de2d26", alpha=0.15, linewidth=0)
    axes["run"].set(xlabel="seconds", ylabel="tokens per second", ylim=(0, None), title="shaded: from kill to rejoin")
    names = {**TIMES, "pause": "largest gap between tokens"}
    for row, name in enumerate(reversed(names)):
        values = [getattr(kill, name) * 1000 for kill in kills]
        axes["kills"].plot(values, [row] * len(values), "o", color="#3182bd", alpha=0.4)
        axes["kills"].plot(statistics.median(values), row, "|", color="#de2d26", markersize=22, markeredgewidth=2)
    axes["kills"].set_yticks(range(len(names)), [names[name] for name in reversed(names)], fontsize=8)
    axes["kills"].set(xscale="log", xlabel="milliseconds from SIGKILL; the mark is the median")
    axes["kills"].grid(True, axis="x", which="both", alpha=0.3)
    for elastic, colour, text in ((True, "#0b6e4f", "elastic"), (False, "#7a7a7a", "membership fixed")):
        found = [phase.tokens_per_second for phase in phases if phase.on == elastic]
        axes["steady"].plot(range(1, len(found) + 1), found, "o-", color=colour, label=text, markersize=4)
    axes["steady"].set(xlabel="pair of phases", ylabel="tokens per second", ylim=(0, None), title="steady state")
    axes["steady"].xaxis.set_major_locator(pyplot.MaxNLocator(integer=True))
    axes["steady"].legend(loc="lower left")
    figure.suptitle(subject, fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_one(path: Path, story: Story, kills: Sequence[Kill]) -> None:
    """The timeline of the kill whose pause is the median one."""
    kill = sorted(kills, key=lambda each: each.pause)[len(kills) // 2]
    begin, length = kill.at - _AROUND, kill.rejoined + 2 * _AROUND
    steps = _steps(story, begin, begin + length)
    moments = [Moment(m.at - begin, m.text, m.kind) for m in story.moments if begin <= m.at <= begin + length]
    tokens = [moment - story.started - begin for moment in story.load.token_times()]
    title = f"rank {kill.rank} is killed under load: largest gap between tokens {kill.pause * 1000:.0f} ms"
    image, web = draw_timeline(path, title, tokens, steps, moments, length)
    web.unlink()
    assert image == path


def _steps(story: Story, begin: float, end: float) -> list[ActiveRanks]:
    """What stood when the picture begins, and what came in it: a loss when it is agreed on, a rejoin when all run."""
    steps: list[ActiveRanks] = []
    for when, view, runs in story.views:
        at = when - story.started - begin
        is_news = not steps or (view.epoch > steps[-1].epoch and (runs or len(view.active) < steps[-1].active))
        if is_news and at < end - begin:
            steps = [*(steps if at > 0 else []), ActiveRanks(max(at, 0.0), len(view.active), view.epoch)]
    return steps
