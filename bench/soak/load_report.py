"""What a soak beside busy processes has shown, as a page. Pure."""

from __future__ import annotations

from typing import Any


def complaints(results: dict[str, Any]) -> list[str]:
    """Why a soak beside busy processes has not passed."""
    lost = ", ".join(f"{rank} (life {life})" for rank, life in results["lives"])
    told = [
        (results["lives"], f"ranks were lost without a fault: {lost}"),
        (results["stalls"], f"{results['stalls']} times a rank was said to stand still"),
        (results["suspicions"], f"{results['suspicions']} times a rank suspected another"),
        (not results["requests"], "no request was answered"),
        (results["failed"], "requests failed"),
        (results["wrong"], "tokens were wrong"),
        (results["burners_left"] < results["burners"], "busy processes ended before the time"),
        (results["left_over"], f"left over: {', '.join(results['left_over'])}"),
    ]
    return [text for is_so, text in told if is_so]


def page(results: dict[str, Any]) -> str:
    machine = results["machine"]
    judged = f"not passed: {'; '.join(results['complaints'])}" if results["complaints"] else "passed"
    lines = ["", "```", *results["lines"], "```"] if results["lines"] else []
    return "\n".join(
        [
            "# A server beside busy processes",
            "",
            f"`{results['command']}` at {results['commit']}, {results['date']}.",
            f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}.",
            "",
            f"**{judged}**: {results['seconds'] / 60:.0f} minutes beside {results['burners']} processes that compute,",
            f"load average {results['load_median']:.1f} (median), {results['load_most']:.1f} (most).",
            f"The real server with four ranks, {results['clients']} clients, no fault.",
            "",
            "| what | count |",
            "|---|---:|",
            f"| lives of ranks that ended or were fenced | {len(results['lives'])} |",
            f"| lines that say that a rank stood still, was stopped or hung | {results['stalls']} |",
            f"| lines in which a rank suspects another | {results['suspicions']} |",
            f"| requests | {results['requests']} |",
            f"| requests that failed | {len(results['failed'])} |",
            f"| answers with a wrong token | {results['wrong']} |",
            f"| longest wait of a client for a token, seconds | {results['largest_gap']:.1f} |",
            *lines,
            "",
        ]
    )
