"""A rank alone, through every kernel: what the sanitizer test runs."""

from __future__ import annotations

import sys

import torch

import eep
from eep.experts.repair.peer_memory import copy_all
from tests import moe
from tests.gpu.lane_ranks import LaneConfig, LaneProgram


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
    # Small halves, so that a few kilobytes already take several rounds.
    for dtype in ("float32", "bfloat16", "uint8"):
        with eep.Rendezvous.temporary() as place:
            program = LaneProgram(0, str(place.path), LaneConfig(max_ranks=2, parts=3, lane_bytes=8192), 60_000, None)
            program.buffer.connect_ranks([0])
            for seed, (count, offset) in enumerate([(0, 0), (7, 1), (9001, 0), (20_000, 1)]):
                program.run(seed, (0,), count, dtype, offset).raise_if_bad()
            program.buffer.close()
    for size in (0, 1, 4097, 300_000):
        source = torch.arange(size, device="cuda").to(torch.uint8)
        target = torch.zeros(size + 1, dtype=torch.uint8, device="cuda")
        copy_all([target[1:]], [source])
        assert torch.equal(target[1:], source)
    print("all well", file=sys.stderr)


if __name__ == "__main__":
    main()
