"""A rank alone, through every kernel: what the sanitizer test runs."""

from __future__ import annotations

import sys

import torch

import eep
from tests import moe


def main() -> None:
    for layout in ("rank", "expert"):
        for wire in ("bf16", "fp8", "fp8_ue8m0", "f32"):
            config = moe.Config(
                ranks=1, max_ranks=2, max_tokens=5, hidden=512, topk=3, layout=layout, wire=wire, device="cuda"
            )
            with eep.Rendezvous.temporary() as place, config.buffer(0, place, timeout_ms=60_000) as buffer:
                buffer.connect_ranks([0])
                for seed in range(3):
                    output = moe.step(buffer, config, seed, (0,))
                    assert torch.equal(output, moe.reference(config, moe.make_batch(config, 0, seed, (0,))))
                buffer.barrier()
                buffer.status().raise_if_bad()
    print("all well", file=sys.stderr)


if __name__ == "__main__":
    main()
