"""The results of a run as Markdown."""

from __future__ import annotations

from typing import Any

from bench.common.drilled_server import origin_lines
from bench.shrink.loss import ENOUGH, WINDOW


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
            "For comparison, the paper (DeepSeek-V3, 256 experts, 1 to 16 ranks lost): recovery in 6 to 11 s at every "
            "number, and of one rank 95 % of the throughput after 52 s; a restart takes 348 s.",
            "",
        ]
    )


def _row(loss: dict[str, Any]) -> str:
    sources = {name: size for name, size in loss["brought_in"].items() if name != "experts"}
    mix = ", ".join(f"{size / 1024:.1f} MiB from {tier}" for tier, size in sources.items())
    enough = "not seen" if loss["enough_s"] is None else f"{loss['enough_s']:.1f} s"
    return (
        f"| {loss['lost']} | {loss['running_s'] * 1e3:.0f} ms | {loss['brought_in']['experts']}{f' ({mix})' if mix else ''} "
        f"| {loss['back_s']:.2f} s | {loss['before_per_s']:.0f}; {loss['without_them_per_s']:.0f} | {enough} |"
    )
