"""Measures expert repair: what the planner costs and moves, how fast each tier is, and how both grow.

The yardstick for placements is DeepSeek's greedy balancer (eplb_greedy.py), for bandwidth a plain copy in the
same run.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from bench.common.arguments import add_files, add_quick, make_parser
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from bench.common.timing import median_seconds
from bench.repair.eplb_greedy import eplb_greedy
from bench.repair.tiers import measure_tiers
from eep.experts.placement.slot_plan import Placement, count_moves, plan_placement
from eep.experts.repair.repair_plan import plan_repair

LAYERS, EXPERTS, RANKS, RANKS_PER_HOST = 58, 256, 32, 8


def expert_loads(layers: int, experts: int, seed: int = 0) -> np.ndarray:
    """Loads as skewed as real routing is: the hottest of 256 experts gets some 15 times the median."""
    return np.random.default_rng(seed).lognormal(0, 1, (layers, experts))


def lost_ranks(number: int, how: str) -> list[int]:
    if how == "host":
        return list(range(number))
    return sorted(np.random.default_rng(number).choice(RANKS, number, replace=False).tolist())


def greedy_moves(before: Placement, load: np.ndarray, active: list[int]) -> tuple[int, Placement] | None:
    """How many surviving slots the yardstick rewrites, since it ignores what is there; and its placement."""
    size = before.slots_per_rank
    if len(active) * size < before.experts:
        return None
    columns = np.concatenate([np.arange(rank * size, (rank + 1) * size) for rank in active])
    table = np.full_like(before.physical_to_logical, -1)
    table[:, columns] = eplb_greedy(load, len(active), size)
    after = Placement(table, before.experts, size)
    return count_moves(before.on(active), after), after


def planner_rows(slots: int) -> list[dict[str, Any]]:
    """One row per loss: our planner with the fewest moves against the yardstick, same placement, same loads."""
    load = expert_loads(LAYERS, EXPERTS)
    topology = [rank // RANKS_PER_HOST for rank in range(RANKS)]
    before = plan_placement(load, None, range(RANKS), slots, topology)
    rows = []
    for how in ("random", "host"):
        for number in (1, 2, 4, 8, 16):
            active = [rank for rank in range(RANKS) if rank not in lost_ranks(number, how)]
            left = before.on(active)
            enough = len(active) * slots >= EXPERTS
            policy = "refuse" if enough else "mask"
            work = partial(plan_placement, load, before, active, slots, topology, when_short=policy)
            after = work()
            greedy = greedy_moves(before, load, active)
            uncovered = int((left.replica_counts == 0).sum())
            find_sources = partial(plan_repair, before, after, active, topology, 44_040_192, disk=True)
            rows.append(
                {
                    "slots_per_rank": slots,
                    "lost": number,
                    "how": how,
                    "milliseconds": 1e3 * median_seconds(work, 7),
                    "sources_milliseconds": 1e3 * median_seconds(find_sources, 7),
                    "surviving_slots_per_layer": len(active) * slots,
                    "uncovered_per_layer": uncovered / LAYERS,
                    "moved_per_layer": count_moves(left, after) / LAYERS,
                    "masked_per_layer": float(after.masked.sum()) / LAYERS,
                    "greedy_moved_per_layer": greedy[0] / LAYERS if greedy else None,
                    "imbalance": float(after.imbalance(load).mean()),
                    "greedy_imbalance": float(greedy[1].imbalance(load).mean()) if greedy else None,
                }
            )
    return rows


def balance_rows() -> list[dict[str, Any]]:
    """What further moves buy after the loss of one rank."""
    load = expert_loads(LAYERS, EXPERTS)
    topology = [rank // RANKS_PER_HOST for rank in range(RANKS)]
    before = plan_placement(load, None, range(RANKS), 9, topology)
    active = [rank for rank in range(RANKS) if rank != 5]
    left = before.on(active)
    fewest = count_moves(left, plan_placement(load, before, active, 9, topology))
    greedy = greedy_moves(before, load, active)
    assert greedy is not None
    rows = [
        {
            "planner": "greedy yardstick",
            "moved_per_layer": greedy[0] / LAYERS,
            "times_fewest": greedy[0] / fewest,
            "imbalance_mean": float(greedy[1].imbalance(load).mean()),
            "imbalance_worst": float(greedy[1].imbalance(load).max()),
            "milliseconds": None,
        }
    ]
    for extra in (0.0, 0.05, 0.5, 1.0, 2.0, 4.0, 8.0, float("inf")):
        work = partial(plan_placement, load, before, active, 9, topology, extra_moves=extra)
        after = work()
        rows.append(
            {
                "planner": f"extra_moves={extra:g}",
                "moved_per_layer": count_moves(left, after) / LAYERS,
                "times_fewest": count_moves(left, after) / fewest,
                "imbalance_mean": float(after.imbalance(load).mean()),
                "imbalance_worst": float(after.imbalance(load).max()),
                "milliseconds": 1e3 * median_seconds(work, 3),
            }
        )
    return rows


def growth_rows(quick: bool) -> list[dict[str, Any]]:
    """One rank lost, for instances of other sizes; ranks to 1024 in simulation."""
    shapes = [(layers, 256, 32, 9) for layers in (15, 30, 58, 116)]
    shapes += [(58, experts, 32, experts // 32 + max(1, experts // 256)) for experts in (128, 512, 1024)]
    shapes += [(58, 256, 64, 5), (58, 256, 128, 3), (58, 256, 256, 2)]
    if not quick:
        shapes += [(58, 256, 512, 2), (58, 256, 1024, 2), (58, 2048, 1024, 3)]
    rows = []
    for layers, experts, ranks, slots in shapes:
        load = expert_loads(layers, experts)
        topology = [rank // RANKS_PER_HOST for rank in range(ranks)]
        before = plan_placement(load, None, range(ranks), slots, topology)
        active = [rank for rank in range(ranks) if rank != ranks // 2]
        work = partial(plan_placement, load, before, active, slots, topology)
        rows.append(
            {
                "layers": layers,
                "experts": experts,
                "ranks": ranks,
                "slots_per_rank": slots,
                "moved_per_layer": count_moves(before.on(active), work()) / layers,
                "milliseconds": 1e3 * median_seconds(work, 3),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    def text(value: Any) -> str:
        if value is None:
            return "–"
        if isinstance(value, float):
            return f"{value:.0f}" if value >= 100 else f"{value:.4g}"
        return str(value)

    heads = list(rows[0])
    lines = ["| " + " | ".join(head.replace("_", " ") for head in heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(text(row[head]) for head in heads) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(
        "bench.repair",
        __doc__,
        "Files: repair.json and repair.md.\n\n"
        "examples:\n"
        "  python -m bench.repair             everything\n"
        "  python -m bench.repair --quick     fewer and smaller cases, printed only",
    )
    add_quick(parser)
    add_files(parser)
    options = parser.parse_args()
    quick = options.quick
    about = provenance()
    sections = {
        "Planner after a loss, 9 slots per rank (256 + 32 experts, 32 ranks, 58 layers)": planner_rows(9),
        "Planner after a loss, 18 slots per rank (room for the loss of half the ranks)": planner_rows(18),
        "What further moves buy after the loss of one rank": balance_rows(),
        "Growth: one rank lost": growth_rows(quick),
        "Repair bandwidth per tier": measure_tiers(experts=16 if quick else 64),
    }
    lines = ["# Expert repair, measured", ""]
    for key, value in about.items():
        shown = ", ".join(f"{name} {what}" for name, what in value.items()) if isinstance(value, dict) else value
        lines.append(f"- {key}: {shown}")
    for title, rows in sections.items():
        lines += ["", f"## {title}", "", table(rows)]
    report = "\n".join(lines) + "\n"
    print(report)
    if not (options.quick or options.no_files):
        write_results(options.results / "repair", {"about": about, "results": sections}, report)


if __name__ == "__main__":
    main()
