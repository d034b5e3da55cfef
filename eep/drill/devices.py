"""What a server for a drill is started with, by the device that it runs on: flags of SGLang, environment, size of model.

In float32 everywhere: there the tokens of a greedy answer do not depend on what else is computed in the same batch, so they
can be checked. Flags that are given later win, for those who want another type and check nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from eep.drill import mps


@dataclass(frozen=True)
class Device:
    name: str
    flags: tuple[str, ...]
    environment: Mapping[str, str]
    model: str
    """The size of random model (see ``eep make-model --size``) that is worth serving there."""
    shared: bool = False
    """Whether several ranks share one device, and need its daemon for their kernels to run at the same time."""

    @contextmanager
    def prepared(self) -> Iterator[dict[str, str]]:
        """While this lasts, servers may run there. What they need in their environment beside ``environment``."""
        if not self.shared:
            yield {}
            return
        with mps.daemon() as variables:
            yield variables

    def caching(self) -> Device:
        """With SGLang's prefix cache, which drills do without: with it, answers depend more on what was asked before."""
        return replace(self, flags=tuple(flag for flag in self.flags if flag != _NO_PREFIX_CACHE))

    def for_ranks(self, ranks: int) -> Device:
        """As it is, but for so many ranks."""
        if _CORES not in self.environment:
            return self
        return replace(self, environment={**self.environment, _CORES: _cores_of(ranks)})


def _cores_of(ranks: int) -> str:
    """One core for each rank, as SGLang reads it."""
    return "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks))


_NO_PREFIX_CACHE = "--disable-radix-cache"
_CORES = "SGLANG_CPU_OMP_THREADS_BIND"
_EVERYWHERE = ("--random-seed", "1", _NO_PREFIX_CACHE, "--skip-server-warmup")

CPU = Device(
    name="cpu",
    flags=(
        *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
        *("--max-total-tokens", "8192"),
        *_EVERYWHERE,
    ),
    environment={
        "EEP_CPU_GAPS": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        _CORES: _cores_of(4),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    },
    model="tiny",
)

CUDA = Device(
    name="cuda",
    flags=(
        *("--device", "cuda", "--dtype", "float32", "--attention-backend", "triton", "--moe-runner-backend", "triton"),
        *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--mm-feature-transport", "cpu"),
        *("--disable-flashinfer-autotune", "--disable-prefill-cuda-graph", "--cuda-graph-max-bs-decode", "32"),
        # All ranks on one device: each may take what is left by the others, and the caches are of one size.
        *("--mem-fraction-static", "0.5", "--max-total-tokens", "32768", "--max-running-requests", "128"),
        *("--chunked-prefill-size", "512", "--max-prefill-tokens", "512"),
        *_EVERYWHERE,
    ),
    environment={"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0", "EEP_CUDA_FLOAT32": "1"},
    model="small",
    shared=True,
)

DEVICES = {device.name: device for device in (CPU, CUDA)}
