"""PyTorch's own tests of torch.distributed, with ranks on two hosts."""

from __future__ import annotations

import pytest
import torch

from tests.process_group.test_torch_suite import LIST, RUN
from tests.process_group.torch_suite import Runner

pytestmark = [
    pytest.mark.skipif(
        not torch.__version__.startswith(LIST["torch"]),
        reason=f"the list of PyTorch's tests is that of torch {LIST['torch']}, this is {torch.__version__}",
    ),
    pytest.mark.timeout(1800),  # one test runs all cases of a kind
]


@pytest.mark.long
@pytest.mark.parametrize("guise", sorted({guise for guise, _ in RUN}))
def test_all_cases_pass_over_two_hosts(guise: str) -> None:
    with Runner(guise, LIST["world_size"], hosts=2) as runner:
        outcomes = [runner.run(case) for kind, case in RUN if kind == guise]
    bad = [f"{outcome.case} {outcome.how}: {outcome.why}" for outcome in outcomes if outcome.how != "passed"]
    assert not bad, "\n".join(bad)
