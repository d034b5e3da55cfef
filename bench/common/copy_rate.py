"""The yardstick on a GPU: how fast it copies."""

from __future__ import annotations

import statistics

import torch


def copy_rate() -> float:
    """Bytes per microsecond that a large copy on the device moves, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rates = []
    for _ in range(10):
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        rates.append(2 * source.numel() / (begin.elapsed_time(end) * 1e3))
    return statistics.median(rates)
