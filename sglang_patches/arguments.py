"""The command line: our flags, what they imply for SGLang's own, and what cannot be had together with them."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from typing import Any

from sglang_patches import cpu, hooks, launcher, model_shape
from sglang_patches.options import Options

logger = logging.getLogger(__name__)
_RUNNING_PER_RANK = 256
"""How many requests a rank runs at once if nobody says. The memory for the exchange of tokens is laid out for it."""


def register() -> None:
    """The flags, in the process that parses the command line."""
    hooks.hook("server_args.ServerArgs.add_cli_args", _add_flags, "after")
    hooks.hook("server_args.ServerArgs.from_cli_args", _from_cli_args)
    hooks.apply()


def _add_flags(_: None, parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("elastic expert parallelism (eep)")
    add = group.add_argument
    add("--ep-backend", choices=("eep",), default=None, help="Expert parallelism that survives the loss of any rank.")
    add(
        "--eep-max-ranks",
        type=int,
        metavar="N",
        default=None,
        help="How many ranks there may ever be; everything is laid out for that many. Only --tp-size is supported yet, "
        "which is the default.",
    )
    add(
        "--eep-timeout-ms",
        type=float,
        metavar="MS",
        default=None,
        help="How long a rank waits for another within a step before it suspects it (default: 1000).",
    )
    add(
        "--eep-redundant-experts",
        type=int,
        metavar="N",
        default=None,
        help="Expert slots beyond the number of experts, over all ranks (default: --ep-num-redundant-experts, or else as "
        "many as it takes for the other ranks to hold every expert when one is lost).",
    )
    add(
        "--eep-backup",
        choices=("off", "live", "checkpoint"),
        default=None,
        help="Keep every expert in host memory too, filled from the live parameters or from the checkpoint (default: off).",
    )
    add(
        "--eep-store",
        metavar="URL",
        default=None,
        help="Where views are agreed on, e.g. http://host:2379 for etcd (default: inside this server).",
    )
    add(
        "--eep-on-lost-coverage",
        choices=("refuse", "mask"),
        default=None,
        help="When the slots that are left cannot hold every expert: wait for a rank to come back, or serve without the "
        "least used experts (default: refuse).",
    )
    add(
        "--eep-relaunch",
        choices=("on", "off"),
        default=None,
        help="Start a rank that died again (default: on).",
    )
    add(
        "--eep-spares",
        type=int,
        metavar="N",
        default=None,
        help="Keep N processes that have imported everything, and on a GPU have opened it; a rank that is started again "
        "takes one (default: 0).",
    )
    add(
        "--eep-faults",
        choices=("on", "off"),
        default=None,
        help="Let 'eep fault' kill, stop and slow down ranks of this server (default: off).",
    )


def _from_cli_args(original: Callable[..., Any], cls: type, arguments: argparse.Namespace) -> Any:
    given = {name: value for name, value in vars(arguments).items() if name.startswith("eep_") and value is not None}
    if getattr(arguments, "ep_backend", None) is None:
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise SystemExit(f"{flags}: these have a meaning only together with --ep-backend eep")
        return original(cls, arguments)
    options = parse(arguments)
    imply(arguments, options)
    options.publish()
    if _device_of(arguments) == "cpu":
        os.environ[cpu.ASKED_FOR] = "1"
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        launcher.start_fork_server()
    hooks.install_all()
    return original(cls, arguments)


def parse(arguments: argparse.Namespace) -> Options:
    """The options, or SystemExit with what is wrong with them."""
    refuse_combinations(arguments)
    ranks = arguments.tp_size
    max_ranks = ranks if arguments.eep_max_ranks is None else arguments.eep_max_ranks
    if max_ranks < ranks:
        raise SystemExit(f"--eep-max-ranks {max_ranks} is less than the {ranks} ranks that --tp-size asks for")
    if max_ranks > ranks:
        raise SystemExit(
            f"--eep-max-ranks {max_ranks} is more than the {ranks} ranks that --tp-size asks for: ranks beyond those that a "
            f"server starts with are not supported yet. Start it with --tp-size {max_ranks}, and take out those that are "
            "not needed with 'eep rank remove'"
        )
    timeout = 1000.0 if arguments.eep_timeout_ms is None else arguments.eep_timeout_ms
    if not 0 < timeout < 1e9:
        raise SystemExit(f"--eep-timeout-ms must be positive, got {timeout}")
    spares = arguments.eep_spares or 0
    if spares < 0:
        raise SystemExit(f"--eep-spares cannot be negative, got {spares}")
    if spares and _one_device_each():
        raise SystemExit(
            "--eep-spares cannot be used with SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS: a spare has looked for devices before "
            "it is known which rank it will be"
        )
    return Options(
        max_ranks=max_ranks,
        timeout_ms=timeout,
        redundant_experts=redundant_experts(arguments, model_shape.experts_of(arguments)),
        backup=arguments.eep_backup or "off",
        store=arguments.eep_store or "",
        on_lost_coverage=arguments.eep_on_lost_coverage or "refuse",
        relaunch=arguments.eep_relaunch != "off",
        faults=arguments.eep_faults == "on",
        spares=spares,
    )


def redundant_experts(arguments: argparse.Namespace, experts: int | None) -> int:
    """How many slots there are beyond the ``experts`` of the model, of which None says that they are not known here."""
    ranks, asked = arguments.tp_size, arguments.eep_redundant_experts
    if asked is None:
        asked = getattr(arguments, "ep_num_redundant_experts", 0) or None
    if asked is None:
        return 0 if experts is None else -(-experts // (ranks - 1)) * ranks - experts
    if asked < 0:
        raise SystemExit(f"--eep-redundant-experts cannot be negative, got {asked}")
    if experts is not None and (spare := (experts + asked) % ranks):
        raise SystemExit(
            f"--eep-redundant-experts {asked}: with the {experts} experts of this model that makes {experts + asked} slots, "
            f"which {ranks} ranks cannot share evenly; ask for {asked + ranks - spare}"
            + (f" or {asked - spare}" if asked >= spare else "")
        )
    return int(asked)


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
            (value("enable_eplb"), "--enable-eplb is not supported: placement is decided by eep"),
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
            (value("enable_lora"), "--enable-lora is not supported"),
            (
                (value("tokenizer_worker_num") or 1) > 1,
                "--tokenizer-worker-num must be 1: the requests that a lost rank had are known to one front end",
            ),
            (value("eep_backup") not in (None, "off"), "--eep-backup: only 'off' is supported yet"),
            (value("eep_store"), "--eep-store is not supported yet: views are agreed on inside the server"),
            (value("eep_on_lost_coverage") == "mask", "--eep-on-lost-coverage: only 'refuse' is supported yet"),
            (value("chunked_prefill_size") == -1, "--chunked-prefill-size must not be -1: a step needs a largest size"),
        )
        if is_wrong
    ]
    if wrong:
        raise SystemExit("--ep-backend eep cannot be used like this:\n  " + "\n  ".join(wrong))


def imply(arguments: argparse.Namespace, options: Options) -> None:
    """Set the flags of SGLang that ``--ep-backend eep`` stands for. A log line tells what a user may wonder about."""
    if not arguments.disable_overlap_schedule:
        logger.info(
            "--ep-backend eep turns overlap scheduling off: a step is committed only when it is known to be good"
        )
    implied = {
        # The models branch on the name of a backend, and this one's branches do what ours needs; see dispatcher.py.
        "moe_a2a_backend": "mooncake",
        "ep_size": arguments.tp_size,
        "ep_num_redundant_experts": options.redundant_experts,
        "disable_overlap_schedule": True,
        # No collective between ranks remains in a step but the exchange of tokens and the one at its boundary.
        "moe_dense_tp_size": 1,
        "enable_dp_lm_head": True,
        "enable_dp_attention_local_control_broadcast": True,
        "max_running_requests": arguments.max_running_requests or _RUNNING_PER_RANK * arguments.tp_size,
        "disable_custom_all_reduce": True,
        # A shared expert that is fused into the routed ones would have to be placed like them.
        "disable_shared_experts_fusion": True,
    }
    for name, value in implied.items():
        if not hasattr(arguments, name):
            raise SystemExit(
                f"--ep-backend eep needs SGLang's --{name.replace('_', '-')}, which this version does not have"
            )
        setattr(arguments, name, value)


def _one_device_each() -> bool:
    return os.environ.get("SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS", "").lower() in ("1", "true", "yes", "y")


def _device_of(arguments: argparse.Namespace) -> str:
    if arguments.device:
        return str(arguments.device)
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
