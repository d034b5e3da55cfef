"""The status of a server as a table for people. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_STYLES = {"good": "32", "change": "33", "bad": "31", "dim": "2", "bold": "1"}
_GOOD = ("ready", "RUN", "READY", "REPAIRED")
_BAD = ("down", "stuck", "DYING", "EXITED", "GIVEN-UP", "STUCK", "SUSPECTED", "REVOKED", "NO-ROOM", "REJECTED", "FAULT")
Paint = Callable[[str, str], str]


def plain(text: str, style: str) -> str:
    return text


def colored(text: str, style: str) -> str:
    """With the escape codes of terminals; ``style`` is one of :data:`_STYLES`."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def style_of(word: str) -> str:
    """For a phase, a rank's status, or the phase of an event."""
    return "good" if word in _GOOD else "bad" if word in _BAD else "change"


def render_status(status: Mapping[str, Any], now: float, paint: Paint = plain) -> str:
    """Several lines: the instance, each rank, and what is under way."""
    ranks = {int(number): rank for number, rank in status["ranks"].items()}
    lines = [_headline(status, ranks, paint), *_under_way(status), ""]
    lines += _columns([_ROW_NAMES, *(_row(number, ranks[number], now) for number in sorted(ranks))], paint)
    return "\n".join([*lines, *_rest(status)])


def _headline(status: Mapping[str, Any], ranks: Mapping[int, Any], paint: Paint) -> str:
    serving = sum(rank["in"] for rank in ranks.values())
    parts = [
        paint(status["phase"], style_of(status["phase"])),
        f"epoch {status['epoch']}",
        f"{serving} of {len(ranks)} ranks in",
    ]
    if status.get("fewest_ranks"):
        parts.append(f"{status['fewest_ranks']} are needed")
    if status.get("open_requests") is not None:
        parts.append(f"{status['open_requests']} requests open")
    if status.get("uncovered_experts"):
        parts.append(paint(f"{status['uncovered_experts']} experts uncovered", "bad"))
    if status.get("draining"):
        parts.append(paint("draining", "change"))
    return "   ".join(parts)


def _under_way(status: Mapping[str, Any]) -> list[str]:
    told = [f"last change: {status['reason']}"] if status.get("reason") else []
    if status.get("waiting_for"):
        told.append(f"waiting for: {status['waiting_for']}")
    for operation in status.get("operations") or ():
        told.append(f"operation {operation['id']}: {operation['action']} {operation['state']}, {operation['reason']}")
    return told


_ROW_NAMES = ("RANK", "STATE", "LIFE", "PID", "FOR", "STILL", "FAILED", "REQUESTS", "KV", "EXPERTS", "DEVICE")


def _row(number: int, rank: Mapping[str, Any], now: float) -> tuple[str, ...]:
    state = rank["status"] if rank["status"] != "ready" or rank["in"] else "ready, not in"
    kv = "-"
    if rank.get("kv_tokens") is not None and rank.get("kv_room"):
        kv = f"{100 * rank['kv_tokens'] / rank['kv_room']:.0f}%"
    return (
        str(number),
        state,
        _or_dash(rank["incarnation"] if rank["incarnation"] >= 0 else None),
        _or_dash(rank["pid"]),
        "-" if rank.get("since") is None else brief(now - rank["since"]),
        "-" if rank["still_for"] is None else f"{rank['still_for']:g} s",
        str(rank["failures"]) if rank["failures"] else "-",
        _or_dash(rank.get("requests")),
        kv,
        _or_dash(rank.get("experts")),
        _or_dash(rank.get("device")),
    )


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _columns(rows: Sequence[tuple[str, ...]], paint: Paint) -> list[str]:
    """Those in which every rank has a dash are left out."""
    kept = [at for at in range(len(rows[0])) if at < 2 or any(row[at] != "-" for row in rows[1:])]
    widths = {at: max(len(row[at]) for row in rows) for at in kept}
    lines = []
    for number, row in enumerate(rows):
        cells = [row[at].ljust(widths[at]) for at in kept]
        if number:
            cells[1] = paint(cells[1], style_of(row[1]))
        line = "  ".join(cells).rstrip()
        lines.append(line if number else paint(line, "bold"))
    return lines


def _rest(status: Mapping[str, Any]) -> list[str]:
    lines = []
    margin = status.get("margin")
    if margin is not None:
        alone = ", ".join(map(str, margin["ranks"])) or "none"
        lines.append(
            f"margin: any {margin['any_ranks']} ranks could go without a repair; alone: {alone}; "
            f"{margin['repairable_ranks']} before slots run out"
        )
    spares = status.get("spares")
    if spares:
        lines.append(f"spares: {spares['ready']} of {spares['wanted']} ready, {spares['preparing']} being prepared")
    if status.get("last_rejection"):
        lines.append(f"last rejection: {status['last_rejection']}")
    return ["", *lines] if lines else []


def brief(seconds: float) -> str:
    """As in ``3 s``, ``12 min``, ``5 h``, ``2 d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
