"""A rank that closes while its kernels still wait for the others: they end well, and no memory goes before."""

from __future__ import annotations

import time

import torch

import eep
from tests import moe
from tests.gpu.test_data_plane import ALL, CONFIG, start
from tests.rank_program import RankProgram
from tests.ranks import Ranks

CLOSING = "closing"
OTHERS = ALL[1:]


class ClosingProgram(RankProgram):
    def combine_and_close(self) -> torch.Tensor:
        """The combine of the last :meth:`dispatch_only`, which no one waits for before the buffer is closed."""
        output = self.buffer.combine(moe.run_experts(self.buffer, self.received), self.received)
        self.tell(CLOSING)
        self.buffer.close()
        return output.cpu()

    def finish_step(self) -> eep.Status:
        super().finish_step()
        torch.cuda.synchronize()  # before that the status says nothing
        return self.buffer.status()


def test_a_combine_in_flight_outlives_the_buffer(rendezvous: eep.Rendezvous) -> None:
    with Ranks(rendezvous, CONFIG, program=ClosingProgram) as group:
        start(group).check_steps(ALL, seed=1)
        group.all(ALL, "dispatch_only", 5, ALL)
        group[0].send("combine_and_close")
        assert group[0].answer() == CLOSING
        time.sleep(0.2)  # not a wait for anything: time for it to close too early, if it does
        for status in group.all(OTHERS, "finish_step").values():
            assert status.ok, status
        assert torch.equal(group[0].answer(), moe.reference(CONFIG, moe.make_batch(CONFIG, 0, 5, ALL)))
        group.all(OTHERS, "disconnect", [0])
        group.check_steps(OTHERS, seed=6, count=3)
