"""Sampling whose draws do not depend on who makes them: by the request's seed and the position of the token, and no more.

SGLang can do that, in the mode in which it is deterministic in everything, and for attention backends that can be. What a
request needs to go on elsewhere with the same draws is less: a seed that goes with it, and a hash of seed, position and
*token*. SGLang hashes the place of the token in its row, which is another one whenever somebody else in the batch asks for
top-p, and refuses min-p; that is why the two functions that draw are ours.

A request that came without a seed gets one from the front end, so that it too goes on as it would have.
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
    """In the front end: with which seed a request is sampled."""

    def __init__(self, draw: Callable[[], int] = lambda: secrets.randbits(63)) -> None:
        self._draw = draw
        self._families: dict[int, tuple[Any, int]] = {}

    @classmethod
    def for_server(cls, server_args: Any) -> Seeds | None:
        """None where they are of no use, and in the mode of SGLang that has a seed of its own for requests without one."""
        if not options.required().seeded or getattr(server_args, "enable_deterministic_inference", False):
            return None
        return cls()

    def seed_for(self, parameters: Any) -> int:
        """The seed that was asked for, or a new one. SGLang sends the ``n`` samples of a request one by one and with one
        object of parameters: the first is drawn with the seed itself, and each of the others with one of its own."""
        given = parameters.sampling_seed
        if given is None:
            return self._draw()
        return _as_int64(given + self._nth(parameters) * _APART)

    def _nth(self, parameters: Any) -> int:
        samples = getattr(parameters, "n", 1)
        if samples <= 1:
            return 0
        # The object is kept, or another one could come to lie where it was.
        _, nth = self._families.pop(id(parameters), (parameters, 0))
        if nth + 1 < samples:
            self._families[id(parameters)] = parameters, nth + 1
            if len(self._families) > _MOST_FAMILIES:  # of requests that were given up halfway
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
    """All rows of all batches have a seed: SGLang joins batches, and then either all of them or none must."""
    if info.sampling_seed is None:
        import torch

        seeds = [_seed_of(request.sampling_params) for request in batch.reqs]
        # As SGLang does it with its own: on a GPU nobody is to wait until the step before is over.
        on_host = torch.tensor(seeds, dtype=torch.int64, pin_memory=torch.device(batch.device).type == "cuda")
        info.sampling_seed = on_host.to(batch.device, non_blocking=True)
    return info


def _seed_of(parameters: Any) -> int:
    if parameters.sampling_seed is None:  # greedy, or of nobody's asking
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
