"""Rank processes that capture one CUDA graph and replay it for ever, whatever happens to the others."""

from __future__ import annotations

import torch

import eep
from eep.data_plane.tokens import RankTokens
from tests import moe
from tests.rank_program import RankProgram


class GraphProgram(RankProgram):
    """A rank whose step is a captured graph of several layers; inputs are written into fixed tensors."""

    LAYERS = 3

    def capture(self) -> list[int]:
        """Captures alone, with no other rank in the view. Returns every address that the graph holds."""
        config = self.config
        self.start_alone()
        self.x = torch.zeros(config.max_tokens, config.hidden, dtype=torch.bfloat16, device="cuda")
        self.idx = torch.full((config.max_tokens, config.topk), -1, dtype=torch.int64, device="cuda")
        self.weights = torch.zeros(config.max_tokens, config.topk, device="cuda")
        self.outputs: list[torch.Tensor] = []
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self._layers()  # loads the kernels
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.outputs = self._layers()
        return self.addresses()

    def _layers(self) -> list[torch.Tensor]:
        outputs = []
        for _ in range(self.LAYERS):
            tokens = self.buffer.dispatch(self.x, self.idx, self.weights)
            assert isinstance(tokens, RankTokens)
            ids = torch.where(tokens.topk_idx >= 0, tokens.topk_idx + self.buffer.rank * self.config.local_experts, -1)
            rows = moe.weighted_sum(moe.dequantize(tokens.x, tokens.scales), ids, tokens.topk_weights)
            self.buffer.combine_input().copy_(rows)
            outputs.append(self.buffer.combine(self.buffer.combine_input(), tokens))
        return outputs

    def replay(self, seed: int, active: tuple[int, ...], count: int) -> tuple[int, eep.Status]:
        """Up to ``count`` replays, ended by the first that is not to be trusted; each trusted result is compared."""
        for i in range(count):
            batch = moe.make_batch(self.config, self.buffer.rank, seed + i, active)
            tokens = batch.x.shape[0]
            self.idx.fill_(-1)
            self.x[:tokens], self.idx[:tokens], self.weights[:tokens] = batch.x, batch.topk_idx, batch.topk_weights
            self.graph.replay()
            torch.cuda.synchronize()
            status = self.buffer.status()
            if not status.ok:
                return i, status
            expected = moe.reference(self.config, batch)
            for layer, output in enumerate(self.outputs):
                assert torch.equal(output[:tokens].cpu(), expected), (
                    f"rank {self.buffer.rank}, replay {i}, layer {layer}"
                )
            self.one_is_over()
        return count, self.buffer.status()

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info()[0]
