"""Measures the balance of experts under loads that drift, against DeepSeek's greedy balancer; and what being ready to move
experts costs a step of the real server while none moves.

Five loads are made from a seed, and one was recorded from a real server (traces.py). Each balancer is told the load up to a
look and serves what comes until the next. The greedy balancer plans for the newest look alone. Doses are planned as the first
rank of a server plans them, from what it remembers.
"""

from __future__ import annotations

from typing import Any

from bench.balance.contenders import follow_trace, rows
from bench.balance.quiet_server import measure_quiet
from bench.balance.traces import TRACES, loads, recorded_loads
from bench.common.arguments import add_files, add_quick, make_parser
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from bench.common.timing import median_seconds
from bench.repair.__main__ import table
from eep.experts.placement.slot_plan import plan_placement
from sglang_patches.rank.expert_location import ExpertLocation, initial_placement

LAYERS, EXPERTS, RANKS, RANKS_PER_HOST, SLOTS = 58, 256, 32, 8, 9
LOST = 5
RECORDED_RANKS, RECORDED_RANKS_PER_HOST, RECORDED_SLOTS = 16, 4, 5
"""For 64 experts."""


def trace_rows(layers: int, looks: int) -> list[dict[str, Any]]:
    topology = [rank // RANKS_PER_HOST for rank in range(RANKS)]
    between = range(looks // 2, looks * 3 // 4)
    made = []
    for trace in TRACES:
        first = next(loads(trace, layers, EXPERTS, 1))
        start = plan_placement(first, None, range(RANKS), SLOTS, topology)
        followers = follow_trace(loads(trace, layers, EXPERTS, looks), start, topology, LOST, between)
        made += rows(trace, followers, layers, between)
    return made


def recorded_rows() -> list[dict[str, Any]]:
    recorded = recorded_loads()
    topology = [rank // RECORDED_RANKS_PER_HOST for rank in range(RECORDED_RANKS)]
    between = range(len(recorded) // 2, len(recorded) * 3 // 4)
    start = plan_placement(recorded[0], None, range(RECORDED_RANKS), RECORDED_SLOTS, topology)
    return rows("recorded", follow_trace(recorded, start, topology, LOST, between), recorded[0].shape[0], between)


def publish_rows() -> list[dict[str, Any]]:
    """What a rank does on the host when a placement changes: show it to the kernels, and compare what they read with it."""
    placement = initial_placement(LAYERS, EXPERTS, SLOTS, RANKS, RANKS)
    location = ExpertLocation(placement, rank=0)
    published = median_seconds(lambda: location.publish(placement, placement), 15)
    checked = median_seconds(location.check, 15)
    return [
        {
            "publish_ms": 1e3 * published,
            "one_comparison_ms": 1e3 * checked,
            "comparisons_share_percent": 100 * 2 * checked / published,
        }
    ]


def main() -> None:
    parser = make_parser(
        "bench.balance",
        __doc__,
        "Files: balance.json and balance.md.\n\n"
        "examples:\n"
        "  python -m bench.balance             everything\n"
        "  python -m bench.balance --quick     few layers and looks, no server, printed only",
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="how long the server is measured (default: 60)"
    )
    add_quick(parser)
    add_files(parser)
    options = parser.parse_args()
    about = provenance()
    layers, looks = (4, 8) if options.quick else (LAYERS, 24)
    sections: dict[str, list[dict[str, Any]]] = {
        f"Loads that drift ({layers} layers, {EXPERTS} + {RANKS * SLOTS - EXPERTS} experts, {RANKS} ranks, {looks} looks; "
        f"rank {LOST} is lost for a quarter of them)": trace_rows(layers, looks)
    }
    recorded = recorded_loads()
    sections[
        f"A recorded load ({len(recorded[0])} layers, {len(recorded[0][0])} + "
        f"{RECORDED_RANKS * RECORDED_SLOTS - len(recorded[0][0])} experts, {RECORDED_RANKS} ranks, {len(recorded)} looks; "
        f"rank {LOST} is lost for a quarter of them)"
    ] = recorded_rows()
    sections["Publishing a placement: one comparison before it and one after (CPU tensors)"] = publish_rows()
    if not options.quick:
        sections["A step of the server while nothing moves (CPU, four ranks)"] = measure_quiet(options.seconds)
    lines = ["# The balance of experts, measured", ""]
    for key, value in about.items():
        shown = ", ".join(f"{name} {what}" for name, what in value.items()) if isinstance(value, dict) else value
        lines.append(f"- {key}: {shown}")
    lines += [
        "",
        "The first loads are made from a seed. At each look every balancer is told what was picked since the last:",
        "",
    ]
    lines += [f"- {name}: {what}" for name, what in TRACES.items()]
    lines += [
        "",
        "The last was recorded (`python -m bench.balance.record`) from a random model that read this repository.",
    ]
    for title, found in sections.items():
        lines += ["", f"## {title}", "", table(found)]
    report = "\n".join(lines) + "\n"
    print(report)
    if not (options.quick or options.no_files):
        write_results(options.results / "balance", {"about": about, "results": sections}, report)


if __name__ == "__main__":
    main()
