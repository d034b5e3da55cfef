"""Sampling that depends on the seed of the request and the position of the token, and not on the rank that does it.

SGLang can do that in the mode in which everything is deterministic, with attention backends that support it. A request that
continues on another rank needs less: a seed that goes with it, and a hash of seed, position and *token*. SGLang hashes the
place of the token in its row. That place changes when another request in the batch asks for top-p, and SGLang refuses min-p.
So the two functions that draw are ours.

A request without a seed gets one from the front end, so that it continues as it would have.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from sglang_patches import hooks, options

_APART = 0x9E3779B97F4A7C15
"""How far apart the seeds of two samples of one request are."""
_MOST_FAMILIES = 1024


class Seeds:
    """In the front end: the seed of each request."""

    def __init__(self, draw: Callable[[], int] = lambda: secrets.randbits(63)) -> None:
        self._draw = draw
        self._families: dict[int, tuple[Any, int]] = {}

    @classmethod
    def for_server(cls, server_args: Any) -> Seeds | None:
        """None where sampling uses no seeds, and in SGLang's deterministic mode, which gives all requests a seed."""
        if not options.required().seeded or getattr(server_args, "enable_deterministic_inference", False):
            return None
        return cls()

    def seed_for(self, parameters: Any) -> int:
        """The seed that the client gave, or a new one. SGLang sends the ``n`` samples of a request one by one, with one
        object of parameters. The first gets the seed itself, and each of the others a seed derived from it."""
        given = parameters.sampling_seed
        if given is None:
            return self._draw()
        return _as_int64(given + self._nth(parameters) * _APART)

    def _nth(self, parameters: Any) -> int:
        samples = getattr(parameters, "n", 1)
        if samples <= 1:
            return 0
        # The object is kept: else a new one might get its address, and so its id.
        _, nth = self._families.pop(id(parameters), (parameters, 0))
        if nth + 1 < samples:
            self._families[id(parameters)] = parameters, nth + 1
            if len(self._families) > _MOST_FAMILIES:  # of requests that were aborted before their last sample
                del self._families[next(iter(self._families))]
        return nth


def _as_int64(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def register() -> None:
    if options.required().seeded:
        hooks.hook("sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", _after_sampling_info, "after")
        hooks.hook("layers.sampler.sampling_from_probs_torch", _sample)
        hooks.hook("layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch", _filter_and_sample)


def _after_sampling_info(info: Any, _cls: type, batch: Any, *__: Any, **___: Any) -> Any:
    """Give every row of every batch a seed: SGLang merges batches, and either all rows must have one or none."""
    if info.sampling_seed is None:
        import torch

        seeds = [_seed_of(request.sampling_params) for request in batch.reqs]
        # Pinned, as SGLang does with its own seeds: else the host would wait on a GPU for the step before.
        on_host = torch.tensor(seeds, dtype=torch.int64, pin_memory=torch.device(batch.device).type == "cuda")
        info.sampling_seed = on_host.to(batch.device, non_blocking=True)
    return info


def _seed_of(parameters: Any) -> int:
    if parameters.sampling_seed is None:  # a greedy request, or one of SGLang's own
        parameters.sampling_seed = secrets.randbits(63)
    return int(parameters.sampling_seed)


def _sample(original: Callable[..., Any], probs: Any, sampling_seed: Any = None, positions: Any = None) -> Any:
    if sampling_seed is None:
        return original(probs, sampling_seed, positions)
    import torch

    from sglang_patches.sampling import seeded_choice

    return seeded_choice.draw_tokens(probs, None, sampling_seed, positions).view(-1).to(torch.int32)


def _filter_and_sample(
    original: Callable[..., Any],
    probs: Any,
    top_ks: Any,
    top_ps: Any,
    min_ps: Any,
    need_min_p_sampling: bool,
    sampling_seed: Any,
    positions: Any,
    **more: Any,
) -> Any:
    if sampling_seed is None:
        return original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **more)
    import torch

    from sglang_patches.sampling import seeded_choice

    weights, tokens = seeded_choice.keep_likely(probs, top_ks, top_ps, min_ps if need_min_p_sampling else None)
    drawn = seeded_choice.draw_tokens(weights, tokens, sampling_seed, positions)
    tokens = tokens.to(torch.int32)
    chosen = tokens.gather(1, drawn).view(-1)
    if more.get("return_filtered_probs"):
        return chosen, weights, tokens, weights.gather(1, drawn).view(-1)
    return chosen
