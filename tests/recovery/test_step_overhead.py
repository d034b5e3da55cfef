from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from eep.recovery.step_overhead import EVERY, TIMES, StepOverhead


class Measured:
    """``took``: how long each measurement takes, one after the other; then the last of them."""

    def __init__(self, *took: float) -> None:
        self._took, self._now, self._measures = list(took), 0.0, False
        self.called: Counter[str] = Counter()
        self.told: list[float] = []
        call: Callable[[str], Callable[[], None]] = lambda name: partial(self.called.update, [name])  # noqa: E731
        self.overhead = StepOverhead([call("step")], [call("exchange")], 3, self.told.append, self._clock)

    def _clock(self) -> float:
        if self._measures:
            self._now += self._took.pop(0) if len(self._took) > 1 else self._took[0]
        self._measures = not self._measures
        return self._now

    def step(self, count: int) -> None:
        for _ in range(count):
            self.overhead.stepped()


def test_every_call_of_a_step_is_made_and_the_median_told() -> None:
    measured = Measured(*map(float, range(TIMES)))
    assert measured.told == [TIMES // 2]
    assert measured.called == {"step": TIMES, "exchange": 3 * TIMES}


def test_it_is_measured_again_while_the_rank_serves_and_hardly_ever() -> None:
    measured = Measured(*[1.0] * TIMES, 5.0)
    measured.step(EVERY - 1)
    assert measured.called["step"] == TIMES, "most steps pay nothing"
    measured.step(1)
    assert measured.called["step"] == TIMES + 1
    assert measured.told == [1.0, 1.0], "one measurement that had to wait changes nothing"
    measured.step(TIMES // 2 * EVERY)
    assert measured.told[-1] == 5.0, "a host that has become slower is seen"
