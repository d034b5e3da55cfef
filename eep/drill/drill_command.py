"""``eep drill``: a server of its own, a mixed load, faults at random, and a result, from the command line."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "drill",
        help="start a server with four ranks, load it with mixed requests, do faults at random, and check every token",
        description="Starts a real SGLang server with a small random model, asks for the fault-free answers, then has "
        "clients ask for them again and again while ranks are killed and stopped. Prints and writes a result as JSON. "
        "The exit code is 0 only if no request failed, no token was wrong, the server never stood still without a reason, "
        "all ranks came back and nothing is left over.",
    )
    parser.add_argument("--case", help="begin with the plan of that name; --list names them")
    parser.add_argument("--list", action="store_true", help="list the plans that are kept, and end")
    parser.add_argument("--device", help="where the ranks run: cpu or cuda (default: cpu)")
    parser.add_argument("--seconds", type=float, help="how long faults come; 0 for none (default: 60)")
    parser.add_argument("--steady", type=float, help="seconds of load before the first fault (default: 5)")
    parser.add_argument("--seed", type=int, help="decides requests and faults (default: 1)")
    parser.add_argument("--clients", type=int, help="how many ask at once (default: 16)")
    parser.add_argument("--spares", type=int, help="ranks in waiting to keep (default: 1)")
    parser.add_argument("--dtype", help="float32 (exact), or bfloat16 (agreement with a control) (default: float32)")
    parser.add_argument("--fp8", action="store_true", default=None, help="experts in blocks of fp8")
    parser.add_argument(
        "--no-overlap", dest="overlap", action="store_false", default=None, help="no overlap scheduling"
    )
    parser.add_argument(
        "--record-steps",
        dest="records_steps",
        action="store_true",
        default=None,
        help="the ranks write down their batches, and the result names the step of each wrong token",
    )
    parser.add_argument("--flag", action="append", dest="flags", help="one more flag for the server; may be repeated")
    parser.add_argument("--out", type=Path, help="write the result there, as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from eep.drill import mixed_drill
    from eep.drill.cases import CASES

    if options.list:
        for name, plan in CASES.items():
            print(
                f"{name:20} {plan.device:5} {plan.clients:3} clients, faults for {plan.seconds:g} s, seed {plan.seed}"
            )
        return 0
    plan = planned(options, CASES, mixed_drill.DrillPlan())
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:8.2f} s  {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="eep-drill-") as place:
        try:
            result = mixed_drill.run_drill(plan, Path(place), say)
        except RuntimeError as error:
            say(f"the drill could not be done: {error}")
            return 2
    document = json.dumps({"case": options.case, **result}, indent=1, default=str)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(document + "\n")
    print(document)
    say(_verdict(result))
    return int(not result["passed"])


def planned(options: argparse.Namespace, cases: dict[str, Any], default: Any) -> Any:
    """The plan that the command line asks for. ValueError if it makes no sense."""
    if options.case is not None and options.case not in cases:
        raise ValueError(f"there is no case {options.case!r}: choose from {', '.join(cases)}")
    plan = default if options.case is None else cases[options.case]
    names = ("device", "seconds", "steady", "seed", "clients", "spares", "dtype", "fp8", "overlap", "records_steps")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.flags:
        given["flags"] = (*plan.flags, *options.flags)
    return replace(plan, **given)


def _verdict(result: dict[str, Any]) -> str:
    return (
        f"{'passed' if result['passed'] else 'FAILED'}: {result['requests']} requests in {result['rank_seconds']:.0f} "
        f"rank-seconds, {result['failed_count']} failed, {result['wrong_count']} wrong, {len(result['faults'])} faults"
    )
