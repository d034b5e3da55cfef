"""Plans of drills that once found something, by name. A new failure adds its plan here and is drilled from then on."""

from __future__ import annotations

from dataclasses import replace

from eep.drill.mixed_drill import DrillPlan
from eep.drill.random_faults import SINGLE_KILLS, FaultMix

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
    "steady-64-overlap": DrillPlan(device="cuda", seconds=0, steady=375, clients=64, spares=2, redundant_experts=8),
    # One SIGKILL ended all ranks under MPS: kills that find long prompts and many decodes under way.
    "kills-64": DrillPlan(
        device="cuda", seconds=150, clients=64, spares=2, fault_mix=replace(SINGLE_KILLS, gap=(5.0, 9.0))
    ),
    # Seconds without a token after a kill or a rejoin: a rank that judged its last step between the exchange of sizes and
    # the next one (it had a request with penalties) was one step behind its peers from then on (Session.settle, owed).
    "kills-140": DrillPlan(
        device="cuda", seconds=90, clients=140, spares=2, fault_mix=replace(SINGLE_KILLS, gap=(5.0, 9.0))
    ),
    # Two and three ranks at once, stopped ranks, joiners and spares killed.
    "storm-64": DrillPlan(device="cuda", seconds=180, clients=64, spares=2),
    "storm-64-bfloat16": DrillPlan(device="cuda", seconds=120, clients=64, spares=2, dtype="bfloat16"),
    "storm-64-fp8": DrillPlan(device="cuda", seconds=120, clients=64, spares=2, dtype="bfloat16", fp8=True),
    # The same on two cores, with a smaller model and fewer clients.
    "storm-cpu": DrillPlan(seconds=60, clients=8, fault_mix=FaultMix(gap=(1.0, 10.0), stopped=(3.0, 8.0))),
    "kills-cpu": DrillPlan(seconds=30, clients=8, fault_mix=SINGLE_KILLS),
}
