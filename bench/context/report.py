"""Results of the bench of long contexts, for people and for programs: percentiles, a page, and a picture."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.context.pauses import Pauses
from bench.context.plan import COPIED, PREFILL, RESTORED, WAYS
from bench.failover.report import percentiles

PAUSES = {
    "moved": "long requests of the lost rank",
    "moved_short": "short requests of the lost rank",
    "others": "requests of other ranks",
    "usual": "all, before the kill",
}
_COMPUTED = re.compile(r"the context of request \S+ is computed again, (\d+) tokens: (.*)")
_OF_A_RANK = re.compile(r"\brank \d+")
_COLOURS = {RESTORED: "#0b6e4f", COPIED: "#2b6cb0", PREFILL: "#de2d26"}


def summary(kills: Sequence[Pauses]) -> list[dict[str, Any]]:
    """Of every length and way that was measured, in this order."""
    cells = sorted({(kill.context, list(WAYS).index(kill.way)) for kill in kills})
    return [
        _cell([kill for kill in kills if (kill.context, list(WAYS).index(kill.way)) == cell], *cell) for cell in cells
    ]


def _cell(kills: Sequence[Pauses], context: int, way: int) -> dict[str, Any]:
    told: dict[str, Any] = {
        "context": context,
        "way": list(WAYS)[way],
        "kills": len(kills),
        "moved_requests": sum(kill.moved_requests for kill in kills),
        "restored_tokens": sum(kill.restored_tokens for kill in kills),
        "recomputed_tokens": sum(kill.recomputed_tokens for kill in kills),
    }
    for name in (*PAUSES, "running", "rejoined"):
        found = [value for kill in kills if (value := getattr(kill, name)) is not None]
        told[name] = {**percentiles(found), "largest_ms": round(1000 * max(found), 1)} if found else None
    return told


def why_computed(log: str) -> dict[str, int]:
    """By the log of a server: why contexts were computed again, and how many; ranks are not told apart."""
    return dict(Counter(_OF_A_RANK.sub("a rank", reason) for _, reason in _COMPUTED.findall(log)))


def complaints(results: dict[str, Any]) -> list[str]:
    """Why a run has not passed."""
    setting, requests = results["setting"], results["requests"]
    unrestored = [
        cell["context"] for cell in results["cells"] if cell["way"] != PREFILL and not cell["restored_tokens"]
    ]
    lacking = sorted(set(setting["contexts"]) - {cell["context"] for cell in results["cells"]})
    told = [
        (requests["failed"], f"{requests['failed']} requests failed"),
        (
            requests["wrong"] and setting["dtype"] == "float32",
            f"{requests['wrong']} answers have a wrong token",
        ),
        (results["ended_by"], results["ended_by"]),
        (lacking, f"contexts of {', '.join(map(str, lacking))} tokens were not measured"),
        (results["left_over"], f"left over: {', '.join(results['left_over'])}"),
        (
            len(results["kills"]) < setting["kills"],
            f"only {len(results['kills'])} of {setting['kills']} kills were done",
        ),
        (unrestored, f"no context of {', '.join(map(str, unrestored))} tokens was restored"),
    ]
    return [text for is_so, text in told if is_so]


def page(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    machine, setting, requests = results["machine"], results["setting"], results["requests"]
    judged = f"not passed: {'; '.join(results['complaints'])}" if results["complaints"] else "passed"
    lines = [
        f"# What a kill costs requests with long contexts, {setting['device']}",
        "",
        f"`{results['command']}`, commit {results['commit']}, {results['date']}.",
        f"{machine['gpu'] + ', ' if 'gpu' in machine else ''}{machine['cpu']}, {machine['cores']} cores, "
        f"load average {setting['load_average'][0]} before and {setting['load_average'][1]} at the end; "
        f"Python {machine['python']}, torch {machine['torch']}, SGLang {setting['sglang']}.",
        *([f"{setting['note']}"] if setting["note"] else []),
        "",
        f"**{judged}**: {len(results['kills'])} kills, {requests['answered']} requests, {requests['failed']} failed, "
        f"{requests['wrong']} with {'a wrong' if setting['dtype'] == 'float32' else 'another'} token.",
        "",
        f"The real SGLang server, {setting['ranks']} ranks, {setting['dtype']}. For each kill up to {setting['long']} "
        f"clients ({_few(setting['clients_with'], setting['long'])}) stream an answer of {setting['tokens']} tokens to a "
        f"prompt of so many tokens, no two alike, and {setting['short']} clients beside them ask short prompts. A rank gets "
        f"SIGKILL when all long answers are at least {setting['kill_after']} tokens long. "
        "*Pause* is the largest gap between two tokens of any such request. Lengths and ways take turns on one server. "
        f"A rank prefills up to {setting['chunk']} tokens in a step.{_spares(setting)}",
        "",
        "| context | way | kills | pause of moved long requests, p50 (p99) ms | of others | usual gap "
        "| tokens restored | computed |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
        *map(_row, results["cells"]),
        "",
        "With fewer than 100 kills the p99 is the largest. *Others* are requests of other ranks, which step together with "
        "those that prefill. *Usual gap*: of all requests in the time before the kill. Tokens are those of all moved "
        "requests, short ones too; the newest token of each is always computed.",
        "",
        f"Why contexts were computed again: {_reasons(results['why_computed'])}.",
    ]
    return "\n".join(lines) + "\n"


def _spares(setting: dict[str, Any]) -> str:
    if setting["device"] == "cpu":
        return ""
    among = ", and mostly some are being prepared" if setting["spares"] > setting["ranks"] else ", all ready"
    return f" At a kill there are {setting['spares']} spares{among}."


def _few(clients: dict[int, int], most: int) -> str:
    told = [f"{count} with {context} tokens" for context, count in clients.items() if count < most]
    return ", ".join(told) or "as many with each length"


def _row(cell: dict[str, Any]) -> str:
    pauses = " | ".join(
        f"{cell[name]['p50_ms']:.0f} ({cell[name]['p99_ms']:.0f})" for name in ("moved", "others", "usual")
    )
    tokens = f"{cell['restored_tokens']} | {cell['recomputed_tokens']}"
    return f"| {cell['context']} | {cell['way']} | {cell['kills']} | {pauses} | {tokens} |"


def _reasons(told: dict[str, int]) -> str:
    return "; ".join(f"{reason} ({count})" for reason, count in sorted(told.items())) or "none was"


def plot(path: Path, kills: Sequence[Pauses], subject: str) -> None:
    """The pause over the length of the context, by way: every kill, and the median."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for axis, name in zip(axes, ("moved", "others"), strict=True):
        for number, (way, text) in enumerate(WAYS.items()):
            of_way = [kill for kill in kills if kill.way == way]
            if not of_way:
                continue
            lengths = sorted({kill.context for kill in of_way})
            shift = 1.04 ** (number - 1)  # or the points of two ways lie on each other
            axis.plot(
                [kill.context * shift for kill in of_way],
                [1000 * getattr(kill, name) for kill in of_way],
                "o",
                color=_COLOURS[way],
                alpha=0.3,
                markeredgewidth=0,
            )
            axis.plot(lengths, _medians(of_way, lengths, name), "-", color=_COLOURS[way], label=text, linewidth=2)
        lengths = sorted({kill.context for kill in kills})
        axis.plot(lengths, _medians(kills, lengths, "usual"), ":", color="#7a7a7a", label="before the kill")
        axis.set(xscale="log", yscale="log", xlabel="tokens of the context", title=PAUSES[name])
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.minorticks_off()
        axis.grid(True, which="both", alpha=0.3)
    axes[0].set_ylabel("largest gap between tokens, ms; lines: medians")
    axes[0].legend(loc="upper left")
    figure.suptitle(subject, fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _medians(kills: Sequence[Pauses], lengths: Sequence[int], name: str) -> list[float]:
    return [1000 * statistics.median(getattr(kill, name) for kill in kills if kill.context == each) for each in lengths]
