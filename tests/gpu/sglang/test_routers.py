"""SGLang's kernel that picks the experts of each row, after a kernel that writes what it reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from sglang_patches import sglang_version, targets
from sglang_patches.cuda import routers

pytest.importorskip("sglang")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

ROWS, EXPERTS, TOPK = 32, 16, 4

pytestmark = pytest.mark.skipif(
    not targets.exists_in(routers.TRITON, sglang_version.installed()),
    reason="this SGLang's router waits before it reads",
)


@triton.jit
def _write_late(bias_ptr, nanoseconds, EXPERTS: tl.constexpr):  # noqa: ANN202
    """Lets the next kernel begin, takes its time, and only then writes the bias."""
    tl.extra.cuda.gdc_launch_dependents()
    began = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - began < nanoseconds:
        pass
    tl.store(bias_ptr + tl.arange(0, EXPERTS), tl.zeros([EXPERTS], tl.float32))


@contextmanager
def launched(early: bool) -> Iterator[None]:
    """With the router launched as SGLang does it, or as the plugin has it."""
    from sglang.kernels.ops.moe import moe_fused_gate as module

    before = module.is_arch_support_pdl
    module.is_arch_support_pdl = (lambda: True) if early else routers.launches_early
    try:
        yield
    finally:
        module.is_arch_support_pdl = before


class Router:
    """A router with the scores of some rows, and what it should pick."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        self.scores = torch.randn(ROWS, EXPERTS, generator=random).cuda()
        self.bias = torch.empty(EXPERTS, device="cuda")
        self.garbage = torch.randn(EXPERTS, generator=random).cuda() * 10
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.expected = self.scores.softmax(-1).topk(TOPK).indices.to(torch.int32)

    def pick(self) -> None:
        """Counts the rows that go to other experts than they should."""
        from sglang.kernels.ops.moe.moe_fused_gate import moe_fused_gate

        _, experts = moe_fused_gate(self.scores, self.bias, TOPK, scoring_func="softmax", renormalize=True)
        self.wrong += (experts != self.expected).any(dim=1).sum()

    def wrong_rows(self) -> int:
        return int(self.wrong.item())


def after_a_late_writer(times: int = 20) -> int:
    router = Router()
    router.pick()  # compiles it
    torch.cuda.synchronize()
    router.wrong.zero_()
    for _ in range(times):
        router.bias.copy_(router.garbage)
        _write_late[(1,)](router.bias, 500_000, EXPERTS)
        router.pick()
    return router.wrong_rows()


def test_the_router_waits_for_what_it_reads() -> None:
    with launched(early=True):
        stock = after_a_late_writer()
    assert stock > 0, "SGLang's router was right: this test cannot tell"
    with launched(early=False):
        assert after_a_late_writer() == 0


def test_rows_of_a_busy_gpu_go_to_their_experts(mps: dict[str, str]) -> None:
    """SGLang's own launch is not asked to fail: how often it does depends on the load."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.sglang.router_load", "15"],
        env={**os.environ, **mps},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)
    usual = json.loads(done.stdout.splitlines()[-1])["usual"]
    assert usual["rows"] > 0
    assert usual["wrong"] == 0
