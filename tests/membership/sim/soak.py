"""Run random schedules until stopped (or for a number of seconds), and keep the seeds that fail."""

from __future__ import annotations

import random
import sys
import time

from tests.membership.sim.schedule import Schedule
from tests.membership.sim.test_schedules import REGRESSIONS


def main(seconds: float) -> int:
    ends, done, failed = time.monotonic() + seconds, 0, 0
    while time.monotonic() < ends:
        seed = random.randrange(2000, 2**53)
        try:
            Schedule(seed).run()
        except Exception as error:
            failed += 1
            why = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            with REGRESSIONS.open("a") as seeds:
                seeds.write(f"{seed} # {why}\n")
            print(f"seed {seed} failed: {why}", flush=True)
        done += 1
        if done % 500 == 0:
            print(f"{done} schedules, {failed} failed", flush=True)
    print(f"{done} schedules, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else float("inf")))
