"""The results of a run as Markdown."""

from __future__ import annotations

from typing import Any

from bench.common.drilled_server import origin_lines
from bench.shrink.loss import ENOUGH, WINDOW

RESTART_S = 348
"""What a restart takes in the paper."""
_ONE = ("11 s, and 8 s when the rank returns", "mostly another GPU", "52 s")
_MORE = ("6 to 11 s, each of the two at most 21 s", "the more from DRAM the more are lost", "not told")


def page(head: dict[str, Any], told: dict[str, Any]) -> str:
    setting, requests = head["setting"], head["requests"]
    return "\n".join(
        [
            f"# Losing several of {setting['ranks']} ranks at once, {setting['device']}",
            "",
            *origin_lines(head),
            f"{setting['ranks']} ranks with {setting['slots']} slots each for {setting['experts']} experts, backup "
            f"{setting['backup']}, {setting['spares'] or 'no'} spares, {setting['clients']} clients that stream answers of "
            f"{setting['tokens']} tokens.",
            "",
            f"{requests['answered']} requests, {requests['failed']} failed, {requests['wrong']} with a wrong token.",
            "",
            f"| lost at once | survivors run after | experts of a layer that they brought in | all are back after | tokens/s "
            f"before; until they are back | {100 * ENOUGH:.0f} % of the tokens/s after |",
            "|---:|---:|---|---:|---:|---:|",
            *(_row(loss) for loss in told["losses"]),
            "",
            f"Tokens per second are taken over {WINDOW:g} s; the last column is when such a window begins.",
            "",
            "Beside the paper's (DeepSeek-V3, 256 experts, 6 nodes with 8 GPUs; its text and its figures 1 and 10):",
            "",
            "| lost at once | survivors run after | paper: pauses | experts come from | paper | 95 % after | paper |",
            "|---:|---:|---:|---|---|---:|---:|",
            *(_beside(loss) for loss in told["losses"]),
            "",
            "The paper gives the mix of sources and the pauses of more than one rank as a figure without numbers. A restart "
            f"takes it {RESTART_S} s.",
            "",
        ]
    )


def _beside(loss: dict[str, Any]) -> str:
    sources = {name: size for name, size in loss["brought_in"].items() if name != "experts"}
    mix = ", ".join(f"{100 * size / sum(sources.values()):.0f} % {tier}" for tier, size in sources.items())
    pause, source, enough = _ONE if loss["lost"] == 1 else _MORE
    mine = "not seen" if loss["enough_s"] is None else f"{loss['enough_s']:.1f} s"
    ours = f"| {loss['lost']} | {loss['running_s'] * 1e3:.0f} ms | {pause} | {mix or 'what survivors have'} | {source} "
    return f"{ours}| {mine} | {enough} |"


def _row(loss: dict[str, Any]) -> str:
    sources = {name: size for name, size in loss["brought_in"].items() if name != "experts"}
    mix = ", ".join(f"{size / 1024:.1f} MiB from {tier}" for tier, size in sources.items())
    enough = "not seen" if loss["enough_s"] is None else f"{loss['enough_s']:.1f} s"
    return (
        f"| {loss['lost']} | {loss['running_s'] * 1e3:.0f} ms | {loss['brought_in']['experts']}{f' ({mix})' if mix else ''} "
        f"| {loss['back_s']:.2f} s | {loss['before_per_s']:.0f}; {loss['without_them_per_s']:.0f} | {enough} |"
    )
