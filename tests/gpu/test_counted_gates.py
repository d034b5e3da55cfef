"""A captured graph counts what gates pick and sends tokens where the tables say, also when they are rewritten in place."""

from __future__ import annotations

import torch

from eep.experts.placement.slot_plan import plan_placement
from sglang_patches.options import BalanceOptions, ServerOptions
from sglang_patches.rank.model_facts import ModelFacts
from sglang_patches.rank.rank_data_plane import RankDataPlane
from sglang_patches.rank.token_forms import MoeShape

LAYERS, EXPERTS, TOKENS, TOPK = 3, 16, 8, 4


def test_a_replayed_step_counts_and_follows_the_tables() -> None:
    asked = ServerOptions(ranks=2, max_ranks=2, balance=BalanceOptions(every=10))
    facts = ModelFacts(0, "cuda", (TOKENS,), asked)
    for layer in range(LAYERS):
        facts.add_layer(layer, MoeShape(EXPERTS, 16, 64, TOPK, torch.bfloat16))
    plane = RankDataPlane(facts)
    picks = torch.randint(0, EXPERTS, (LAYERS, TOKENS, TOPK), dtype=torch.int32, device="cuda")
    picks[:, -1] = -1
    plane.location, plane.used, plane.one, plane._offsets  # noqa: B018

    def step() -> list[torch.Tensor]:
        chosen = []
        for layer in range(LAYERS):
            column = picks[layer] + plane.one
            chosen.append(plane.choose(layer, column))
            plane.count(layer, column)
        return chosen

    step()
    torch.cuda.synchronize()
    assert plane.used is not None
    plane.used.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = step()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    wanted = torch.stack([torch.bincount(each.flatten() + 1, minlength=EXPERTS + 1) for each in picks.long().cpu()])
    assert (plane.count_uses() == 5 * wanted[:, 1:].numpy()).all()
    before = torch.stack(chosen).cpu()
    assert (before[:, -1] == -1).all()

    first = plane.location.placement
    moved = plan_placement(torch.ones(LAYERS, EXPERTS).numpy(), first, [1], 16, [0, 0])
    plane.location.publish(moved, moved)
    graph.replay()
    torch.cuda.synchronize()
    after = torch.stack(chosen).cpu()
    assert (after[:, :-1] // 16 == 1).all(), "rank 1 holds everything now"
    assert not torch.equal(before, after)
