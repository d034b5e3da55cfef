"""What differs between devices in the bench of failover: the flags and the environment of the server, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from eep.drill.server import FOUR_RANKS

RANKS = 4
# Room for every expert on every rank, and patience with ranks that share their cores: only deaths are measured here.
_ELASTIC = (*FOUR_RANKS, "--eep-redundant-experts", "48", "--eep-timeout-ms", "20000")


@dataclass(frozen=True)
class Setting:
    """Of a server with four ranks: later flags override those that ``eep.drill.server`` gives to all."""

    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def _cpu() -> Setting:
    return Setting(_ELASTIC)


def _cuda() -> Setting:
    """Four ranks on one GPU. Run it under MPS (``tests/gpu/with_mps.sh``)."""
    flags = (
        *("--device", "cuda", "--attention-backend", "triton", "--sampling-backend", "pytorch"),
        *("--grammar-backend", "none", "--moe-runner-backend", "triton", "--disable-flashinfer-autotune"),
        *("--disable-prefill-cuda-graph", "--cuda-graph-max-bs-decode", "32", "--mm-feature-transport", "cpu"),
        *("--max-running-requests", "128", "--mem-fraction-static", "0.5", "--max-total-tokens", "32768"),
        *("--chunked-prefill-size", "512", "--max-prefill-tokens", "512"),
    )
    without_cpu = {"EEP_CPU_GAPS": "0", "SGLANG_USE_CPU_ENGINE": "0", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
    return Setting((*_ELASTIC, *flags), without_cpu)


SETTINGS = {"cpu": _cpu, "cuda": _cuda}
