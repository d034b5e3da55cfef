"""Every figure that EEP tells Prometheus: its kind, its name, and what it means."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure as Prometheus knows it. Prometheus shows the name of a counter with ``_total`` at its end."""

    kind: str
    name: str
    help: str
    label: str = ""


METRICS = {
    "epoch": Metric("gauge", "eep_epoch", "The epoch of the committed view."),
    "active": Metric("gauge", "eep_active_ranks", "Ranks in the committed view."),
    "deaths": Metric(
        "counter", "eep_rank_deaths", "Incarnations of ranks that ended without having been asked to leave."
    ),
    "joins": Metric(
        "counter", "eep_rank_joins", "Incarnations of ranks that entered a running view, first ones included."
    ),
    "relaunches": Metric("counter", "eep_rank_relaunches", "Processes started for a rank that had one before."),
    "view_seconds": Metric(
        "gauge", "eep_last_view_seconds", "Of the last loss: from its first sign to the view without the lost ranks."
    ),
    "repair_seconds": Metric(
        "gauge",
        "eep_last_repair_seconds",
        "Of the last view: from its commit until all its ranks had settled in it.",
    ),
    "pause_seconds": Metric(
        "gauge", "eep_last_pause_seconds", "Of the last change: how long no rank could commit a step."
    ),
    "rejoin_seconds": Metric(
        "gauge",
        "eep_last_rejoin_seconds",
        "Of the last rank that came back: from the first sign of its loss until it ran in a view again.",
    ),
    "steps_repeated": Metric("counter", "eep_steps_repeated", "Forward passes that ranks ran again, over all ranks."),
    "step_overhead": Metric(
        "gauge",
        "eep_step_overhead_seconds",
        "What EEP's bookkeeping adds to a step on the host of a rank; measured on its own, between two of many steps.",
        "rank",
    ),
    "requests_moved": Metric("counter", "eep_requests_moved", "Requests that went on at another rank or incarnation."),
    "requests_masked": Metric(
        "counter", "eep_masked_requests", "Requests that were computed, in part at least, while experts were masked."
    ),
    "kv_restored": Metric(
        "counter",
        "eep_kv_restored_tokens",
        "Tokens of moved requests whose cache entries came from a lost rank: from its cache, or its copy in host memory.",
        "source",
    ),
    "kv_recomputed": Metric(
        "counter", "eep_kv_recomputed_tokens", "Tokens of moved requests that are computed again, or were there."
    ),
    "kv_backup_covered": Metric(
        "gauge",
        "eep_kv_backup_covered_tokens",
        "Tokens of open requests whose cache entries are in host memory too.",
        "rank",
    ),
    "kv_backup_lag": Metric(
        "gauge", "eep_kv_backup_lag_tokens", "Tokens of open requests that are still to be copied there.", "rank"
    ),
    "backup_held": Metric("gauge", "eep_backup_experts_held", "Experts, over all layers, in the backup of this host."),
    "backup_wanted": Metric("gauge", "eep_backup_experts_wanted", "Experts, over all layers, that are to be there."),
    "backup_bytes": Metric("gauge", "eep_backup_bytes", "Bytes of host memory that they take."),
    "anchored_bytes": Metric(
        "gauge", "eep_anchored_bytes", "Bytes of memory that outlives the ranks it is for, by what it is for.", "kind"
    ),
    "room_bytes": Metric(
        "gauge",
        "eep_room_bytes",
        "Bytes of its KV cache that a rank has given to more expert slots, or all of it where it serves experts only.",
        "rank",
    ),
    "serves_requests": Metric(
        "gauge", "eep_rank_serves_requests", "1 where a rank serves requests, 0 where it serves experts only.", "rank"
    ),
    "repair_bytes": Metric(
        "counter", "eep_repair_bytes", "Bytes of experts that ranks brought in, by the tier they came from.", "tier"
    ),
    "view_time": Metric(
        "histogram", "eep_view_seconds", "From the first sign of a loss to the view without the lost ranks."
    ),
    "repair_time": Metric(
        "histogram", "eep_repair_seconds", "From the commit of a view until all its ranks had settled."
    ),
    "pause_time": Metric("histogram", "eep_pause_seconds", "How long no rank could commit a step, of each change."),
    "rejoin_time": Metric(
        "histogram", "eep_rejoin_seconds", "From the first sign of a rank's loss until it ran in a view again."
    ),
    "losses": Metric("counter", "eep_rank_losses", "Incarnations of ranks that ended, by what ended them.", "cause"),
    "margin_any": Metric("gauge", "eep_margin_ranks", "How many ranks, any of them, could go now without a repair."),
    "margin_repairable": Metric(
        "gauge", "eep_margin_repairable_ranks", "How many ranks could go before there are fewer slots than experts."
    ),
    "uncovered": Metric("gauge", "eep_uncovered_experts", "Experts, over all layers, that no rank holds."),
    "masked": Metric("gauge", "eep_masked_experts", "Those of them that are served without."),
    "spares_ready": Metric(
        "gauge", "eep_spares_ready", "Prepared processes that can become a rank: whole ranks, or only warm.", "kind"
    ),
    "spares_wanted": Metric("gauge", "eep_spares_wanted", "How many there are to be.", "kind"),
    "requests_open": Metric("gauge", "eep_open_requests", "Requests that were accepted and have not ended."),
    "requests_waiting": Metric("gauge", "eep_waiting_requests", "Those of them that no rank has."),
}
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, math.inf)
"""The upper bounds of every histogram, in seconds."""


def bucket_of(seconds: float) -> float:
    """The lowest bound that is not exceeded."""
    return next(bound for bound in BUCKETS if seconds <= bound)
