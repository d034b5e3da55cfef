"""The status of a server as a table for people. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eep.anchor.held_kinds import sum_held

_STYLES = {"good": "32", "change": "33", "bad": "31", "dim": "2", "bold": "1"}
_GOOD = ("ready", "RUN", "READY", "REPAIRED")
_BAD = (
    "down",
    "stuck",
    "DYING",
    "EXITED",
    "GIVEN-UP",
    "STUCK",
    "SUSPECTED",
    "REVOKED",
    "NO-ROOM",
    "REJECTED",
    "FAULT",
    "EVIDENCE",
)
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
    several = status.get("links") is not None
    lines += _columns([_ROW_NAMES, *(_row(number, ranks[number], now, several) for number in sorted(ranks))], paint)
    return "\n".join([*lines, *_other_hosts(status), *_rest(status)])


def _other_hosts(status: Mapping[str, Any]) -> list[str]:
    hosts: Mapping[str, Sequence[int]] = status.get("other_hosts") or {}
    told = [f"{name}: ranks {', '.join(map(str, hosts[name]))} in" for name in sorted(hosts)]
    if missing := status.get("missing_links"):
        told.append(f"no link to {', '.join(missing)}: ranks of this host that are not in wait for it")
    return told


def _headline(status: Mapping[str, Any], ranks: Mapping[int, Any], paint: Paint) -> str:
    serving = sum(rank["in"] for rank in ranks.values())
    several = status.get("links") is not None
    parts = [
        paint(status["phase"], style_of(status["phase"])),
        f"epoch {status['epoch']}",
        f"{serving} of {len(ranks)} ranks{' of this host' if several else ''} in",
    ]
    if several:
        elsewhere = sum(map(len, (status.get("other_hosts") or {}).values()))
        parts.append(f"{serving + elsewhere} of all hosts")
    if status.get("fewest_ranks"):
        parts.append(f"{status['fewest_ranks']} are needed")
    if status.get("open_requests") is not None:
        parts.append(f"{status['open_requests']} requests open")
    if status.get("masked_experts"):
        parts.append(paint(f"{status['masked_experts']} experts masked", "bad"))
    elif status.get("uncovered_experts"):
        parts.append(paint(f"{status['uncovered_experts']} experts uncovered", "bad"))
    if status.get("draining"):
        parts.append(paint("draining", "change"))
    return "   ".join(parts)


def _under_way(status: Mapping[str, Any]) -> list[str]:
    told = [f"last change: {status['reason']}"] if status.get("reason") else []
    now = (status.get("change") or {}).get("under_way")
    if now:
        came = ", ".join(f"{count >> 20} MiB from {tier}" for tier, count in now["bytes"].items())
        told.append(
            f"under way for {now['seconds']:g} s: {len(now['settled'])} of {len(status['active'])} ranks have settled, "
            f"{now['experts']} experts brought in{f' ({came})' if came else ''}"
        )
    if status.get("waiting_for"):
        told.append(f"waiting for: {status['waiting_for']}")
    for operation in status.get("operations") or ():
        told.append(f"operation {operation['id']}: {operation['action']} {operation['state']}, {operation['reason']}")
    return told


_ROW_NAMES = (
    *("RANK", "STATE", "ROLE", "LIFE", "PID", "FOR", "STILL", "FAILED", "REQUESTS", "KV", "ROOM", "EXPERTS"),
    *("HOST", "DEVICE"),
)


def _row(number: int, rank: Mapping[str, Any], now: float, several_hosts: bool) -> tuple[str, ...]:
    state = rank["status"] if rank["status"] != "ready" or rank["in"] else "ready, not in"
    kv = "-"
    if rank.get("kv_tokens") is not None and rank.get("kv_room"):
        kv = f"{100 * rank['kv_tokens'] / rank['kv_room']:.0f}%"
    return (
        str(number),
        state,
        "-" if rank.get("role", "both") == "both" else rank["role"],
        _or_dash(rank["incarnation"] if rank["incarnation"] >= 0 else None),
        _or_dash(rank["pid"]),
        "-" if rank.get("since") is None else brief(now - rank["since"]),
        "-" if rank["still_for"] is None else f"{rank['still_for']:g} s",
        str(rank["failures"]) if rank["failures"] else "-",
        _or_dash(rank.get("requests")),
        kv,
        size(rank["room_bytes"]) if rank.get("room_bytes") else "-",
        _or_dash(rank.get("experts")),
        _or_dash(rank.get("host") if several_hosts else None),
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
        hosts = "" if margin.get("any_hosts") is None else f" or {_any_of(margin['any_hosts'], 'host')}"
        if hosts:
            alone += f", hosts: {', '.join(margin.get('hosts') or ()) or 'none'}"
        lines.append(
            f"margin: {_any_of(margin['any_ranks'], 'rank')}{hosts} could go without a repair; alone: {alone}; "
            f"{margin['repairable_ranks']} before slots run out"
        )
    spares = status.get("spares")
    if spares:
        lines.append(f"spares: {spares['ready']} of {spares['wanted']} ready, {spares['preparing']} being prepared")
    lines += _kept(status)
    if status.get("last_rejection"):
        lines.append(f"last rejection: {status['last_rejection']}")
    return ["", *lines] if lines else []


def _any_of(count: int, what: str) -> str:
    return f"any {count} {what}{'' if count == 1 else 's'}" if count else f"no {what}"


def _kept(status: Mapping[str, Any]) -> list[str]:
    """What outlives ranks."""
    lines = []
    backup = status.get("backup")
    if backup:
        runs = f"process {backup['pid']}" if backup["pid"] is not None else f"does not run, {backup['starts']} starts"
        wanted = "" if backup["wanted"] is None else f" of {backup['wanted']}"
        lines.append(f"backup: {backup['held']}{wanted} experts ({size(backup['bytes'])}), {runs}")
    copies = status.get("context_copies")
    if copies:
        lines.append(
            f"context copies: {copies['covered_tokens']} tokens, {copies['lag_tokens']} behind; "
            f"{size(copies['bytes'])}, room for {copies['room_tokens']}"
        )
    held = {kind: count for kind, count in sum_held(status.get("anchored") or ()).items() if count}
    if held:
        lines.append(f"anchored: {', '.join(f'{kind} {size(count)}' for kind, count in held.items())}")
    return lines


def size(count: float) -> str:
    """As in ``512 B``, ``3.0 MiB``, ``1.5 GiB``."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count:.0f} B"


def brief(seconds: float) -> str:
    """As in ``3 s``, ``12 min``, ``5 h``, ``2 d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
