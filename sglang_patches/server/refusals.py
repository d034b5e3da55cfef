"""What ``--ep-backend eep`` refuses before anything starts: flags, models, and services that this machine lacks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from eep.control.launch.processes import require_pidfds
from eep.errors import EepError
from sglang_patches import options
from sglang_patches.options import StoreOptions
from sglang_patches.server import server_store

RUN = ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "GptOssForCausalLM")
"""Architectures that were served with the plugin and gave, token by token, the answers of one rank."""
_NOT_RUN = "SGLang's code for it suits, but nobody has compared its answers with those of one rank"
_SPARSE = "its attention keeps an index beside the cache, which repair and restored contexts do not know"
_ADDS_UP = "in SGLang its ranks add up their parts with a collective, and would mix different requests"
REASONS = {
    "DeepseekV2ForCausalLM": _NOT_RUN,
    "Glm4MoeLiteForCausalLM": _NOT_RUN,
    "DeepseekV32ForCausalLM": _SPARSE,
    "GlmMoeDsaForCausalLM": _SPARSE,
    "MixtralForCausalLM": _ADDS_UP,
}
"""Architectures that are not served, and why."""
_UNKNOWN = "SGLang's code for it is not known to leave the exchange of tokens to a backend"
ANY_MODEL = "EEP_ANY_MODEL"


def refuse_combinations(arguments: argparse.Namespace) -> None:
    """SystemExit if a flag does not go together with ``--ep-backend eep``. Its text says which, why, and what to do."""

    def value(name: str, default: Any = None) -> Any:
        return getattr(arguments, name, default)

    ranks = value("tp_size", 1)
    wrong = [
        reason
        for is_wrong, reason in (
            (value("pp_size", 1) != 1, "--pp-size must be 1: eep cannot replace a lost pipeline stage yet"),
            (
                value("dist_init_addr") is not None,
                "--dist-init-addr is not supported: the processes of a host talk over Unix sockets in the server's private "
                "directory, and hosts find each other through --eep-store; leave it out",
            ),
            (
                value("grpc_port") is not None or value("grpc_mode") or value("smg_grpc_mode"),
                "--grpc-port, --grpc-mode and --smg-grpc-mode are not supported: their requests would go past the checks of "
                "the HTTP routes, and one of them can end every rank; leave them out",
            ),
            (
                value("use_ray") or value("encoder_only"),
                "--use-ray and --encoder-only are not supported: they start other servers, in which eep has no part; leave "
                "them out",
            ),
            (ranks < 2, "--tp-size must be at least 2: no server survives the loss of its only rank"),
            (
                not value("enable_dp_attention"),
                "--enable-dp-attention is needed: each rank must own its requests; add it",
            ),
            (
                value("dp_size", 1) != ranks,
                "--dp-size must equal --tp-size: eep cannot split the attention of a request over ranks",
            ),
            (value("ep_size", 1) not in (1, ranks), "--ep-size must equal --tp-size: every rank holds experts"),
            (
                value("attn_cp_size", 1) not in (None, 1),
                "--attn-cp-size must be 1: eep cannot split the attention of a request over ranks",
            ),
            (
                value("speculative_algorithm"),
                "--speculative-algorithm is not supported: a draft may outlive a step that was lost; leave it out",
            ),
            (
                value("decoupled_spec_role") not in (None, "null"),
                "--decoupled-spec-role is not supported: a draft may outlive a step that was lost; leave it out",
            ),
            (
                value("enable_two_batch_overlap") or value("enable_single_batch_overlap"),
                "--enable-two-batch-overlap and --enable-single-batch-overlap are not supported: a rank can judge a step "
                "only when all of it is over; leave them out",
            ),
            (
                value("enable_mixed_chunk"),
                "--enable-mixed-chunk is not supported: penalties would miss tokens of requests that decode in a mixed step; "
                "leave it out",
            ),
            (
                value("enable_hierarchical_cache") or value("enable_lmcache") or value("enable_flexkv"),
                "a prefix cache outside of the device (hierarchical cache, LMCache, FlexKV) is not supported: a step that "
                "runs again may overwrite what the cache loads; leave it out",
            ),
            (
                value("eplb_algorithm", "auto") not in (None, "auto"),
                "--eplb-algorithm is not supported: eep plans which experts move; leave it out",
            ),
            (
                value("ep_dispatch_algorithm"),
                "--ep-dispatch-algorithm is not supported: eep chooses the copy of an expert; leave it out",
            ),
            (
                value("enable_memory_saver"),
                "--enable-memory-saver is not supported: peers may need the memory that a rank gives up; leave it out",
            ),
            (
                value("elastic_ep_backend"),
                "--elastic-ep-backend names another elastic backend; leave out one of the two",
            ),
            (
                value("init_expert_location", "trivial") != "trivial",
                "--init-expert-location is not supported: eep places the experts; leave it out",
            ),
            (
                value("moe_a2a_backend") not in (None, "none", "mooncake"),
                "--moe-a2a-backend is not supported: eep exchanges the tokens; leave it out",
            ),
            (
                value("disaggregation_mode", "null") not in (None, "null"),
                "--disaggregation-mode is not supported: prefill and decode run on the same ranks; leave it out",
            ),
            (
                value("enable_pdmux"),
                "--enable-pdmux is not supported: it runs parts of steps, and eep judges whole ones; leave it out",
            ),
            (
                value("enable_lora") or value("lora_paths"),
                "--enable-lora and --lora-paths are not supported: repair does not move adapters; leave them out",
            ),
            (
                value("enable_prefill_delayer"),
                "--enable-prefill-delayer is not supported: ranks would exchange messages outside of steps; leave it out",
            ),
            (
                value("enable_expert_distribution_metrics")
                or value("expert_balancedness_report_mode", "off") not in (None, "off"),
                "--enable-expert-distribution-metrics and --expert-balancedness-report-mode are not supported: ranks would "
                "add up how balanced experts are outside of their steps; leave them out",
            ),
            (
                value("enable_custom_logit_processor") and not value("disable_overlap_schedule"),
                "--enable-custom-logit-processor needs --disable-overlap-schedule: in a step that runs again, a processor "
                "would see one token more than before; add it",
            ),
            (
                (value("max_queued_requests") or 0) < 0,
                "--max-queued-requests must not be negative: give 0 or more, or leave it out for any number of requests",
            ),
            (
                (value("tokenizer_worker_num") or 1) > 1,
                "--tokenizer-worker-num must be 1: one front end has to know all the requests that a lost rank had",
            ),
            (
                (value("detokenizer_worker_num") or 1) > 1,
                "--detokenizer-worker-num must be 1: SGLang would have several talk over sockets that other users can reach, "
                "and would end with each of them",
            ),
            (
                value("chunked_prefill_size") == -1,
                "--chunked-prefill-size must not be -1: buffers are laid out for the largest step; give a number of tokens",
            ),
        )
        if is_wrong
    ]
    if wrong:
        raise SystemExit("--ep-backend eep cannot be used with these flags:\n  " + "\n  ".join(wrong))


def refuse_on(device: str, arguments: argparse.Namespace) -> None:
    """SystemExit if a flag does not go together with the device."""
    if device == "cpu" and getattr(arguments, "enable_torch_compile", False):
        raise SystemExit(
            "--enable-torch-compile cannot be used with --ep-backend eep on a CPU: a rank that is killed while it compiles "
            "would leave half a file in a cache that all ranks load from; leave it out"
        )


def refuse_model(architectures: Sequence[str], quantisation: str | None = None) -> None:
    """SystemExit if a model is not known to give right answers. ``architectures`` as its configuration names them, empty if
    it names none; ``quantisation`` as it names that."""
    if quantisation == "mxfp4":
        raise SystemExit(
            "--ep-backend eep cannot serve a checkpoint in MXFP4: SGLang gives a rank only the part of its experts that it "
            "would have without redundant ones; use a checkpoint of the model in bfloat16"
        )
    if not architectures or any(each in RUN for each in architectures) or os.environ.get(ANY_MODEL) == "1":
        return
    reasons = "; ".join(f"{each}: {REASONS.get(each, _UNKNOWN)}" for each in architectures)
    raise SystemExit(
        f"--ep-backend eep cannot serve {reasons}. Served are {', '.join(RUN)}. Set {ANY_MODEL}=1 to serve it all the same, "
        "and compare its answers with those of a server of one rank"
    )


def check_variables() -> None:
    """SystemExit if a variable that is needed later, when there is no good way to refuse it, is no number; or if one opens a
    way to the ranks that goes past the checks of the HTTP routes."""
    options.drain_limit()
    options.relaunch_limit()
    for name, unused in (("SGLANG_GRPC_PORT", ("",)), ("SGLANG_RUST_SERVER", ("", "false", "0", "no", "n"))):
        if (value := os.environ.get(name, "")).lower() not in unused:
            raise SystemExit(
                f"{name}={value} cannot be used with --ep-backend eep: requests would go past the checks of the HTTP routes, "
                "and one of them can end every rank; unset the variable"
            )


def check_services(backup: str, store: StoreOptions | None) -> None:
    """SystemExit if this machine lacks a package, a service or a system call that the server needs."""
    try:
        require_pidfds()
    except EepError as error:
        raise SystemExit(f"--ep-backend eep: {error}") from None
    if backup != "off":
        from eep.experts.backup import transfer_engine

        try:
            transfer_engine.require_mooncake()
        except EepError as error:
            raise SystemExit(f"--eep-backup {backup}: {error}") from None
    if store is not None:
        server_store.check_reachable(store)
