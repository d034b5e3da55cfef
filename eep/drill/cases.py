"""Plans of drills that once found something, by name. A new failure adds its plan here and is drilled from then on."""

from __future__ import annotations

from dataclasses import replace

from eep.drill.mixed_drill import DrillPlan
from eep.drill.random_faults import KILLS, SINGLE_KILLS, FaultMix
from eep.drill.request_mix import RequestMix

_KILLS_ONLY = FaultMix(gap=(2.0, 7.0), weights=dict.fromkeys(KILLS, 1.0) | {"kill-1": 6.0, "joiner": 1.0})

CASES = {
    # Wrong tokens without any fault: decode steps of 16 rows a rank, beside prompts of several chunks. SGLang's router read
    # a bias before it was there (sglang_patches/cuda/routers.py).
    "steady-64": DrillPlan(
        device="cuda",
        seconds=0,
        steady=375,
        clients=64,
        spares=0,
        overlap=False,
        redundant_experts=8,
    ),
    "steady-64-overlap": DrillPlan(device="cuda", seconds=0, steady=375, clients=64, spares=4, redundant_experts=8),
    # One SIGKILL ended all ranks under MPS: kills that find long prompts and many decodes under way.
    "kills-64": DrillPlan(
        device="cuda", seconds=150, clients=64, spares=4, fault_mix=replace(SINGLE_KILLS, gap=(5.0, 9.0))
    ),
    # Seconds without a token after a kill or a rejoin: a rank that judged its last step between the exchange of sizes and
    # the next one (it had a request with penalties) was one step behind its peers from then on (Session.settle, owed).
    "kills-140": DrillPlan(
        device="cuda", seconds=90, clients=140, spares=4, fault_mix=replace(SINGLE_KILLS, gap=(5.0, 9.0))
    ),
    # Two and three ranks at once, stopped ranks, joiners and spares killed.
    "storm-64": DrillPlan(device="cuda", seconds=180, clients=64, spares=4),
    "storm-64-bfloat16": DrillPlan(device="cuda", seconds=120, clients=64, spares=4, dtype="bfloat16"),
    "storm-64-fp8": DrillPlan(device="cuda", seconds=120, clients=64, spares=4, dtype="bfloat16", fp8=True),
    # Kills under long contexts, which come along into the prefix caches of other ranks: prompts of several thousand tokens,
    # some with a beginning in common. They are copied to host memory meanwhile.
    "contexts-32": DrillPlan(
        device="cuda",
        seconds=90,
        clients=32,
        spares=4,
        mix=RequestMix(32, ((0.2, 3, 400), (0.2, 1500, 3000), (0.6, 3000, 7500)), (500, 2500), answers=(16, 200)),
        fault_mix=_KILLS_ONLY,
        flags=("--max-total-tokens", "131072", "--eep-kv-backup", "16GiB"),
        needs_contexts=True,
    ),
    "contexts-cpu": DrillPlan(
        seconds=40,
        clients=6,
        mix=RequestMix(8, ((0.4, 3, 40), (0.6, 300, 700)), (200,), answers=(16, 48)),
        fault_mix=replace(_KILLS_ONLY, gap=(2.0, 10.0)),
        flags=("--eep-kv-backup", "256MiB"),
        needs_contexts=True,
    ),
    # The same on two cores, with a smaller model and fewer clients.
    "storm-cpu": DrillPlan(seconds=60, clients=8, fault_mix=FaultMix(gap=(1.0, 10.0), stopped=(3.0, 8.0))),
    "kills-cpu": DrillPlan(seconds=30, clients=8, fault_mix=SINGLE_KILLS),
}
