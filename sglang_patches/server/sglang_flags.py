"""What our flags imply for SGLang's own."""

from __future__ import annotations

import argparse
import logging

from sglang_patches import sglang_version
from sglang_patches.options import ServerOptions
from sglang_patches.server import balance_flags

logger = logging.getLogger(__name__)
_RUNNING_PER_RANK = 256
"""How many requests a rank runs at once unless ``--max-running-requests`` says. The token buffers are laid out for it."""


def imply(arguments: argparse.Namespace, options: ServerOptions) -> None:
    """Set the flags of SGLang that ``--ep-backend eep`` stands for. A log line says what may surprise an operator."""
    ranks, max_ranks = options.ranks, options.max_ranks
    if max_ranks > ranks:
        logger.info(
            "SGLang is told of %d ranks (--eep-max-ranks); the server starts the first %d of them", max_ranks, ranks
        )
    implied = {
        # Each host has a server of its own, and ranks find those of other hosts without SGLang.
        # SGLang makes sockets, groups and tables once, for every rank that there may ever be. A rank that was not started
        # yet looks to SGLang like a lost one.
        "nnodes": 1,
        "node_rank": 0,
        "tp_size": max_ranks,
        "dp_size": max_ranks,
        "ep_size": max_ranks,
        # The models branch on the name of a backend, and this one's branches do what ours needs; see dispatcher.py.
        "moe_a2a_backend": "mooncake",
        "ep_num_redundant_experts": options.redundant_experts,
        # No collective between ranks remains in a step but the exchange of tokens and the one at its boundary.
        "moe_dense_tp_size": 1,
        "enable_dp_lm_head": True,
        "enable_dp_attention_local_control_broadcast": True,
        # SGLang divides these by the number of ranks; each rank gets what it gets without ranks that may be added.
        "max_running_requests": running(arguments) * max_ranks // ranks,
        # The front end bounds the queue of all ranks. A rank that did would drop the requests of a lost one.
        "max_queued_requests": None,
        "disable_custom_all_reduce": True,
        # What a context is restored from is a cache with the same slots in every layer, those with a window too.
        "disable_hybrid_swa_memory": True,
        # A shared expert that is fused into the routed ones would have to be placed like them.
        "disable_shared_experts_fusion": True,
    }
    if options.on_lost_coverage == "mask":
        # Later requests would find there what was computed while experts were masked.
        implied["disable_radix_cache"] = True
    if chunk := getattr(arguments, "chunked_prefill_size", None):
        implied["chunked_prefill_size"] = chunk * max_ranks // ranks
    balance_flags.hide_from_sglang(arguments)
    for name, value in implied.items():
        if not hasattr(arguments, name):
            raise SystemExit(
                f"--ep-backend eep needs SGLang's --{name.replace('_', '-')}, which this version of SGLang does not have; "
                f"install a version from {sglang_version.OLDEST} to {sglang_version.NEWEST}"
            )
        setattr(arguments, name, value)


def running(arguments: argparse.Namespace) -> int:
    """How many requests the first ranks run at once, all together. Before :func:`imply` counts those that may be added."""
    return int(arguments.max_running_requests or _RUNNING_PER_RANK * arguments.tp_size)
