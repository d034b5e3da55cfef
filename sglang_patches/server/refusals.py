"""What cannot be had together with ``--ep-backend eep``, or not on this machine: refused before anything starts."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from typing import Any

from eep.errors import EepError
from sglang_patches.server import server_store

logger = logging.getLogger(__name__)
RUN = ("Qwen3MoeForCausalLM",)
"""Architectures that have been run."""
READ = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
)
"""Those whose code, in all versions of SGLang that are supported, does what ours needs."""
ANY_MODEL = "EEP_ANY_MODEL"


def refuse_combinations(arguments: argparse.Namespace) -> None:
    """SystemExit if something was asked for that does not go together with ``--ep-backend eep``, with the reason."""

    def value(name: str, default: Any = None) -> Any:
        return getattr(arguments, name, default)

    ranks = value("tp_size", 1)
    wrong = [
        reason
        for is_wrong, reason in (
            (value("pp_size", 1) != 1, "--pp-size must be 1: a lost pipeline stage cannot be replaced yet"),
            (value("nnodes", 1) != 1, "--nnodes must be 1: regions reach as far as one host"),
            (ranks < 2, "--tp-size must be at least 2: the loss of the only rank cannot be survived"),
            (not value("enable_dp_attention"), "--enable-dp-attention is needed: a rank must own its requests"),
            (value("dp_size", 1) != ranks, "--dp-size must equal --tp-size: attention may not be split over ranks"),
            (value("ep_size", 1) not in (1, ranks), "--ep-size must equal --tp-size: every rank hosts experts"),
            (
                value("attn_cp_size", 1) not in (None, 1),
                "--attn-cp-size must be 1: attention may not be split over ranks",
            ),
            (
                value("speculative_algorithm"),
                "--speculative-algorithm is not supported: a draft may outlive a lost step",
            ),
            (
                value("enable_two_batch_overlap") or value("enable_single_batch_overlap"),
                "batch overlap is not supported: a step must be over before it is known to be good",
            ),
            (
                value("enable_mixed_chunk"),
                "--enable-mixed-chunk is not supported: penalties would miss tokens of requests that decode in such a step",
            ),
            (
                value("enable_hierarchical_cache") or value("enable_lmcache") or value("enable_flexkv"),
                "a prefix cache outside of the device is not supported: a step that is run again may overwrite what it loads",
            ),
            (value("enable_eplb"), "--enable-eplb is not supported: placement is decided by eep"),
            (value("ep_dispatch_algorithm"), "--ep-dispatch-algorithm is decided by eep; leave it out"),
            (
                value("enable_memory_saver"),
                "--enable-memory-saver is not supported: what a rank gives up, others may need",
            ),
            (value("elastic_ep_backend"), "--elastic-ep-backend is another elastic backend; choose one of the two"),
            (value("init_expert_location", "trivial") != "trivial", "--init-expert-location is decided by eep"),
            (
                value("moe_a2a_backend") not in (None, "none", "mooncake"),
                "--moe-a2a-backend is decided by eep; leave it out",
            ),
            (
                value("disaggregation_mode", "null") not in (None, "null"),
                "prefill/decode disaggregation is not supported",
            ),
            (value("enable_pdmux"), "--enable-pdmux is not supported: it runs parts of steps"),
            (value("enable_lora") or value("lora_paths"), "--enable-lora and --lora-paths are not supported"),
            (
                value("enable_prefill_delayer"),
                "--enable-prefill-delayer is not supported: ranks would tell each other something outside of their steps",
            ),
            (
                value("enable_expert_distribution_metrics")
                or value("expert_balancedness_report_mode", "off") not in (None, "off"),
                "a report of how balanced experts are is not supported: ranks would add it up outside of their steps",
            ),
            (
                value("enable_custom_logit_processor") and not value("disable_overlap_schedule"),
                "--enable-custom-logit-processor needs --disable-overlap-schedule: in a step that is run again, a processor "
                "would see a token more than it did",
            ),
            (
                value("max_queued_requests") is not None,
                "--max-queued-requests is not supported: the requests of a lost rank come to the others at once, and would "
                "be dropped",
            ),
            (
                (value("tokenizer_worker_num") or 1) > 1,
                "--tokenizer-worker-num must be 1: the requests that a lost rank had are known to one front end",
            ),
            (value("chunked_prefill_size") == -1, "--chunked-prefill-size must not be -1: a step needs a largest size"),
        )
        if is_wrong
    ]
    if wrong:
        raise SystemExit("--ep-backend eep cannot be used like this:\n  " + "\n  ".join(wrong))


def refuse_model(architectures: Sequence[str]) -> None:
    """SystemExit if a model does not leave the exchange of tokens to a backend, or is not known to: its ranks would add up
    what they have of different requests. ``architectures`` as its configuration names them; none if that is not known."""
    if not architectures or any(each in RUN for each in architectures):
        return
    if any(each in READ for each in architectures):
        logger.warning(
            "--ep-backend eep has not been run with %s, though SGLang's code of it suits: compare its answers with those of "
            "one rank",
            ", ".join(architectures),
        )
    elif os.environ.get(ANY_MODEL) != "1":
        raise SystemExit(
            f"--ep-backend eep cannot serve {', '.join(architectures)}: it is not known to leave the exchange of tokens to a "
            f"backend. Known are {', '.join((*RUN, *READ))}. With {ANY_MODEL}=1 any other is served; then compare its "
            "answers with those of one rank"
        )


def check_services(arguments: argparse.Namespace) -> None:
    """SystemExit if something that was asked for needs what is not there."""
    if arguments.eep_backup not in (None, "off"):
        from eep.experts.backup import transfer_engine

        try:
            transfer_engine.require()
        except EepError as error:
            raise SystemExit(f"--eep-backup {arguments.eep_backup}: {error}") from None
    if arguments.eep_store is not None:
        server_store.check_reachable(arguments.eep_store)
