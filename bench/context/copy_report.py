"""Results of the bench of what the host copy costs: what was copied when, complaints, and a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.common.comparison import phases_table, turns_table
from bench.common.drilled_server import origin_lines
from bench.common.phases import Phase
from bench.common.turns import Turn
from bench.context.copy_switch import copied_within

NAMES = ("copied", "at_rest")
HEADINGS = ("copy at work", "copy at rest")
WANTED = 0.98
"""Throughput with the copy at work over that with the copy at rest: at least this."""
TAIL = 0.2
"""Seconds for which a pass of the copy may still be under way when it is put to rest."""


def count_copied(
    copied: Sequence[tuple[float, int]], phases: Sequence[Phase], turns: Sequence[Turn]
) -> dict[str, dict[str, int]]:
    """Tokens that were copied in phases and in turns, at work and at rest. A turn may be hardly longer than a tail, so of one
    at rest its second half counts."""
    at_work = [phase for phase in phases if phase.on]
    return {
        "phases": {
            "contexts": sum(phase.contexts for phase in at_work),
            "at_work": copied_within(copied, [(phase.began, phase.ended) for phase in at_work]),
            "at_rest": copied_within(copied, [(each.began + TAIL, each.ended) for each in phases if not each.on]),
        },
        "turns": {
            "at_work": copied_within(copied, [(turn.began, turn.ended) for turn in turns if turn.on]),
            "at_rest": copied_within(copied, [((t.began + t.ended) / 2, t.ended) for t in turns if not t.on]),
        },
    }


def complaints(results: dict[str, Any]) -> list[str]:
    """Why a run has not passed. How much the copy costs is for the reader to judge."""
    told = [(results["left_over"], f"left over: {', '.join(results['left_over'])}")]
    for where, tokens in results["copied"].items():
        told += [
            (not tokens["at_work"], f"nothing was copied in {where} with the copy at work"),
            (tokens["at_rest"], f"{tokens['at_rest']} tokens were copied in {where} with the copy at rest"),
        ]
    return [text for is_so, text in told if is_so]


def page(head: dict[str, Any], told: dict[str, Any]) -> str:
    """The results as Markdown."""
    setting, copied, turns = head["setting"], head["copied"], told["turns"]
    judged = f"not passed: {'; '.join(head['complaints'])}" if head["complaints"] else "passed"
    level = told["steady"]["tokens_per_second"]
    lines = [
        f"# What the copy of contexts in host memory costs, {setting['device']}",
        "",
        *origin_lines(head),
        f"Load average {setting['load_average'][0]} before and {setting['load_average'][1]} at the end.",
        *([setting["note"]] if setting["note"] else []),
        "",
        f"**{judged}**. Tokens per second with the copy at work are {level['copied_over_at_rest']:.3f} of those with it at "
        f"rest (median of {told['steady']['pairs']} pairs of phases, quartiles {level['quartiles'][0]:.3f} to "
        f"{level['quartiles'][1]:.3f}); steps per second while all decode {turns['of_all_steps']['mean']:.4f} (95 % interval "
        f"{turns['of_all_steps']['least']:.4f} to {turns['of_all_steps']['most']:.4f}). At least {WANTED} is wanted.",
        "",
        f"The real SGLang server, {setting['ranks']} ranks, `--eep-kv-backup {setting['kv_backup']}`, {setting['dtype']}, "
        f"no prefix cache. {setting['clients']} clients stream answers of {setting['tokens'] // 2} to {setting['tokens']} "
        f"tokens to prompts of {setting['prompt_tokens'] // 6} to {setting['prompt_tokens']} tokens. The copy is put to "
        "rest and to work in the running server (`bench/context/copy_switch.py`).",
        "",
        f"In phases of {setting['phase_seconds']:g} s with the copy at work {copied['phases']['at_work']} tokens were "
        f"copied, of {copied['phases']['contexts']} that prompts and answers had; with it at rest "
        f"{copied['phases']['at_rest']}. In turns {copied['turns']['at_work']} and {copied['turns']['at_rest']}.",
        "",
        *phases_table(told["steady"], NAMES, HEADINGS),
        "",
        f"All clients decode, in turns of some {setting['turns']['turn']:g} s while every client streams an answer of "
        f"{setting['turns']['tokens']} tokens, {len(turns['of_each_block'])} blocks of four turns:",
        "",
        *turns_table(turns, NAMES),
    ]
    return "\n".join(lines) + "\n"
