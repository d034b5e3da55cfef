"""``eep drill`` as it is typed."""

from __future__ import annotations

import pytest

from eep.cli import main
from eep.drill.cases import CASES
from eep.drill.mixed_drill import DrillPlan


def test_the_plans_that_are_kept_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--list"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in CASES)


def test_a_case_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--case", "none"]) != 0
    assert "there is no case 'none': choose from" in capsys.readouterr().err


@pytest.mark.parametrize(("field", "value"), [("device", "tpu"), ("clients", 0), ("seconds", -1.0)])
def test_a_plan_that_makes_no_sense_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"device|clients|seconds"):
        DrillPlan(**{field: value})  # type: ignore[arg-type]


def test_tokens_are_compared_in_float32_only() -> None:
    assert DrillPlan().exact
    assert not DrillPlan(dtype="bfloat16").exact
    assert not DrillPlan(fp8=True).exact
