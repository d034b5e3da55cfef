"""Measures how long the survivors feel the loss of a rank, and what a view change costs as instances grow.

Part one kills real rank processes, which run real dispatch and combine steps, with SIGKILL. It measures from
the kill until the supervisor has revoked the epoch, until the step of every survivor has ended because of
that, until the new view is committed, and until every survivor has committed a step in it. Part two counts
the messages and the virtual time of one view change in the simulator.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from bench.common.arguments import add_files, add_quick, make_parser
from bench.common.provenance import provenance
from bench.common.result_files import say_written
from bench.common.timing import percentile
from bench.membership.times import SLOT
from eep.control.supervisor.settings import LaunchSettings
from eep.control.supervisor.supervisor import Supervisor
from eep.membership import Action, Effect, Notify, OperatorAsked, Phase, Policy, RankStatus, Revoke
from tests.membership.sim.scale import view_change_cost

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 300.0
Samples = dict[str, list[float]]


class Killing:
    """An instance of ``ranks`` real ranks; kills some of them and brings them back, round after round."""

    def __init__(self, supervisor: Supervisor, times: Path, ranks: int) -> None:
        self._supervisor, self._times, self._ranks = supervisor, times, ranks
        self._revokes: dict[int, int] = {}
        self._commits: dict[int, int] = {}
        supervisor.watch_effects(self._note)

    def _note(self, effect: Effect) -> None:
        if isinstance(effect, Revoke):
            self._revokes.setdefault(effect.epoch, time.monotonic_ns())
        elif isinstance(effect, Notify):
            self._commits.setdefault(effect.view.epoch, time.monotonic_ns())

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.005)

    def runs_with(self, count: int) -> bool:
        instance = self._supervisor.instance
        return instance is not None and instance.phase is Phase.RUN and len(instance.view.active) == count

    def seen_by(self, rank: int) -> tuple[int, int, int, int]:
        with self._times.open("rb") as file:
            file.seek(rank * SLOT.size)
            words: tuple[int, int, int, int] = SLOT.unpack(file.read(SLOT.size))
            return words

    async def kill_one(self, chance: random.Random) -> dict[str, float]:
        """Kills a rank; returns the milliseconds from the kill to each event that follows."""
        instance = self._supervisor.instance
        assert instance is not None
        view = instance.view
        await self.until(lambda: all(self.seen_by(rank)[2] >= view.epoch for rank in view.active))
        victim = chance.choice(view.active)
        killed = time.monotonic_ns()
        os.kill(self._supervisor.pids[victim], signal.SIGKILL)
        survivors = [rank for rank in view.active if rank != victim]
        await self.until(lambda: all(self.seen_by(rank)[2] > view.epoch for rank in survivors))
        seen = [self.seen_by(rank) for rank in survivors]
        steps = [revoked_at for revoked, revoked_at, _, _ in seen if revoked == view.epoch]
        moments = {
            "revoked by the supervisor": self._revokes[view.epoch],
            "revoke seen by all": max(steps) if steps else self._revokes[view.epoch],
            "view committed": self._commits[view.epoch + 1],
            "first good step of all": max(committed_at for _, _, _, committed_at in seen),
        }
        return {name: (at - killed) / 1e6 for name, at in moments.items()}

    async def relaunch(self, round_number: int) -> None:
        def settled() -> bool:
            return all(
                local.status in (RankStatus.READY, RankStatus.DOWN) for local in self._supervisor.state.ranks.values()
            )

        await self.until(settled)  # the killed processes have ended
        for rank, local in self._supervisor.state.ranks.items():
            if local.status is RankStatus.DOWN:
                self._supervisor.feed(OperatorAsked(f"bench-{round_number}-{rank}", Action.LAUNCH, rank))
        await self.until(lambda: self.runs_with(self._ranks))


async def kill_real_ranks(ranks: int, kills: int) -> Samples:
    samples: Samples = {}
    per_round = max(1, ranks // 4)
    with tempfile.TemporaryDirectory() as directory:
        times = Path(directory) / "times"
        times.write_bytes(bytes(SLOT.size * ranks))
        supervisor = Supervisor(
            [sys.executable, "-m", "bench.membership.rank"],
            range(ranks),
            # The supervisor relaunches no rank by itself; this benchmark asks for it between rounds.
            Policy(max_ranks=ranks, relaunch_limit=0, settle_deadline=PATIENCE),
            launch=LaunchSettings(
                {"EEP_BENCH_TIMES": str(times), "EEP_BENCH_RANKS": str(ranks), "PYTHONPATH": str(ROOT)}
            ),
        )
        await supervisor.start()
        try:
            killing, chance = Killing(supervisor, times, ranks), random.Random(ranks)
            await killing.until(lambda: killing.runs_with(ranks))
            done = 0
            while done < kills:
                for _ in range(min(per_round, kills - done)):
                    for name, milliseconds in (await killing.kill_one(chance)).items():
                        samples.setdefault(name, []).append(milliseconds)
                    done += 1
                    print(f"{ranks} ranks: {done} of {kills} kills", end="\r", file=sys.stderr)
                await killing.relaunch(done)
        finally:
            await supervisor.stop()
    return samples


def summary(values: list[float]) -> dict[str, float]:
    return {
        "p50_ms": round(statistics.median(values), 3),
        "p99_ms": round(percentile(values, 0.99), 3),
        "samples": len(values),
    }


def main() -> None:
    parser = make_parser(
        "bench.membership",
        __doc__,
        "Files: membership.json.\n\n"
        "examples:\n"
        "  python -m bench.membership                  everything\n"
        "  python -m bench.membership --quick          does it work? about half a minute\n"
        "  python -m bench.membership --ranks --no-files   the simulator alone",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="*",
        default=[4, 8, 16],
        help="numbers of real ranks; none: no part one (default: 4 8 16)",
    )
    parser.add_argument("--kills", type=int, default=50, help="kills for each number of real ranks (default: 50)")
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[8, 64, 512, 4096], help="simulated ranks (default: 8 64 512 4096)"
    )
    add_quick(parser)
    add_files(parser)
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.kills, options.sizes, options.no_files = [4], 2, [8, 64], True
    results: dict[str, object] = {**provenance(), "real": {}, "simulated": {}}
    real: dict[str, object] = {}
    for ranks in options.ranks:
        samples = asyncio.run(kill_real_ranks(ranks, options.kills))
        real[str(ranks)] = {name: summary(values) for name, values in samples.items()}
        print(f"\n{ranks} ranks, {options.kills} kills; milliseconds from SIGKILL")
        for name, values in samples.items():
            told = summary(values)
            print(f"  {name:28} p50 {told['p50_ms']:8.2f}   p99 {told['p99_ms']:8.2f}")
    simulated: dict[str, object] = {}
    for ranks in options.sizes:
        cost = view_change_cost(ranks)
        told = {**asdict(cost), "messages_per_rank": round(cost.messages / ranks, 3)}
        simulated[str(ranks)] = told
        print(
            f"simulated {ranks:5} ranks on {told['hosts']:4} hosts: {told['messages']:6} messages, {told['virtual_ms']} ms"
        )
    results.update(real=real, simulated=simulated)
    if not options.no_files:
        options.results.mkdir(parents=True, exist_ok=True)
        path = options.results / "membership.json"
        path.write_text(json.dumps(results, indent=2) + "\n")
        say_written([path])


if __name__ == "__main__":
    main()
