"""The command line: our flags."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from typing import Any

from sglang_patches import cpu, hooks, installation
from sglang_patches.cpu import sinks
from sglang_patches.cuda import gpu_sharing
from sglang_patches.cuda import implied_flags as gpu_flags
from sglang_patches.options import ServerOptions
from sglang_patches.server import (
    anchor_flag,
    balance_flags,
    coverage_flags,
    expert_slots,
    hardware_flags,
    host_flags,
    kv_backup,
    launcher,
    machine_limits,
    model_shape,
    portion_flag,
    refusals,
    sglang_flags,
    store_flags,
)
from sglang_patches.server.stall_timeout import add_stall_flags, choose_hang_timeout, choose_stall_timeout

logger = logging.getLogger(__name__)
_CORES = "SGLANG_CPU_OMP_THREADS_BIND"
_HEALTH_ASKS_A_RANK = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"


def register() -> None:
    """The flags, in the process that parses the command line."""
    hooks.hook("server_args.ServerArgs.add_cli_args", _add_flags, "after")
    hooks.hook("server_args.ServerArgs.from_cli_args", _from_cli_args)
    hooks.apply()


def _add_flags(_: None, parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("elastic expert parallelism (eep)")
    add = group.add_argument
    add(
        "--ep-backend",
        choices=("eep",),
        default=None,
        help="Serve with expert parallelism that survives the loss of any rank.",
    )
    add(
        "--eep-max-ranks",
        type=int,
        metavar="N",
        default=None,
        help="The most ranks that this server can ever have. It starts with --tp-size of them; 'eep rank launch' adds others "
        "(default: --tp-size).",
    )
    add(
        "--eep-timeout-ms",
        type=float,
        metavar="MS",
        default=None,
        help="How long a rank waits for a peer within a step before it suspects the peer. On a CPU it waits longer where a "
        "rank prefills (default: 1000, on a GPU 10000).",
    )
    add(
        "--eep-repair-timeout-s",
        type=float,
        metavar="S",
        default=None,
        help="How long a rank may take to bring in the experts that a new view gives it. The supervisor relaunches a rank "
        "that takes longer; allow more where experts come from a slow disk (default: 120).",
    )
    add_stall_flags(add)
    portion_flag.add_portion_flag(add)
    add(
        "--eep-redundant-experts",
        type=int,
        metavar="N",
        default=None,
        help="Expert slots beyond the number of experts, summed over the ranks that the server starts with. A rank that is "
        "added later has as many slots as each of those (default: --ep-num-redundant-experts; without that, as many as the "
        "other ranks need to hold every expert when one is lost).",
    )
    add(
        "--eep-backup",
        choices=("off", "live", "checkpoint"),
        default=None,
        help="Keep a copy of every expert in host memory, taken from the live parameters or from the checkpoint "
        "(default: off).",
    )
    balance_flags.add_balance_flags(add)
    store_flags.add_store_flags(add)
    host_flags.add_host_flags(add)
    coverage_flags.add_coverage_flags(add)
    add(
        "--eep-relaunch",
        choices=("on", "off"),
        default=None,
        help="Whether the supervisor relaunches a rank that died (default: on).",
    )
    add(
        "--eep-keep-context",
        choices=("on", "off"),
        default=None,
        help="Whether the KV cache of a rank outlives it, so that requests that move to another rank bring their context "
        "along instead of having it computed again (default: on).",
    )
    kv_backup.add_backup_flag(add)
    add(
        "--eep-keep-weights",
        choices=("on", "off"),
        default=None,
        help="Whether the weights of a rank outlive it, so that its next life takes them over instead of loading them "
        "(default: on).",
    )
    anchor_flag.add_anchor_flag(add)
    hardware_flags.add_hardware_flags(add)
    add(
        "--eep-spares",
        type=int,
        metavar="N",
        default=None,
        help="Keep N spares: ranks in waiting, up to their first step. A rank that is lost comes back as its own. Ranks have "
        "one each before one has two (default: 0).",
    )
    add(
        "--eep-faults",
        choices=("on", "off"),
        default=None,
        help="Whether 'eep fault' may kill, stop and slow down ranks of this server (default: off).",
    )


def _from_cli_args(original: Callable[..., Any], cls: type, arguments: argparse.Namespace) -> Any:
    given = {name: value for name, value in vars(arguments).items() if name.startswith("eep_") and value is not None}
    if getattr(arguments, "ep_backend", None) is None:
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise SystemExit(f"{flags}: these flags need --ep-backend eep; add it, or leave them out")
        return original(cls, arguments)
    options = parse(arguments)
    machine_limits.require_limits(options.max_ranks)
    sglang_flags.imply(arguments, options)
    options.publish()
    # An orchestrator must not restart a server that recovers: /health says that it lives, /health_generate that it is ready.
    os.environ.setdefault(_HEALTH_ASKS_A_RANK, "false")
    if device_of(arguments) == "cpu":
        os.environ[cpu.ASKED_FOR] = "1"
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        require_cores(options.max_ranks, os.environ.get(_CORES, ""))
        launcher.start_fork_server()
        cpu.fill_gaps()
        sinks.allow()
    else:
        gpu_flags.imply_gpu_flags(arguments)
        if os.environ.get(launcher.FORKS_ON_GPU) != "0":
            launcher.start_fork_server()
    installation.install_all()
    return original(cls, arguments)


def parse(arguments: argparse.Namespace) -> ServerOptions:
    """The options. SystemExit if a flag, or a combination of flags, is refused; its text says why."""
    refusals.refuse_combinations(arguments)
    refusals.refuse_on(device_of(arguments), arguments)
    ranks = arguments.tp_size
    max_ranks = ranks if arguments.eep_max_ranks is None else arguments.eep_max_ranks
    if max_ranks < ranks:
        raise SystemExit(
            f"--eep-max-ranks {max_ranks} is less than the {ranks} ranks that --tp-size asks for; raise it to {ranks} or more"
        )
    default_timeout = 1000.0 if device_of(arguments) == "cpu" else gpu_flags.TIMEOUT_MS
    timeout = default_timeout if arguments.eep_timeout_ms is None else arguments.eep_timeout_ms
    if not 0 < timeout < 1e9:
        raise SystemExit(f"--eep-timeout-ms {timeout}: give a number of milliseconds above 0 and below 1e9")
    repair_timeout = 120.0 if arguments.eep_repair_timeout_s is None else arguments.eep_repair_timeout_s
    if not 0 < repair_timeout < 1e6:
        raise SystemExit(f"--eep-repair-timeout-s {repair_timeout}: give a number of seconds above 0 and below 1e6")
    experts = model_shape.experts_of(arguments)
    refusals.refuse_model(model_shape.architectures_of(arguments), model_shape.quantisation_of(arguments))
    store = store_flags.parse_store(arguments)
    host = host_flags.parse_host(arguments, max_ranks, device_of(arguments))
    redundant = expert_slots.redundant_experts(arguments, experts, 1 if host is None else host.ranks_each)
    refusals.check_services(arguments.eep_backup or "off", store)
    refusals.check_variables()
    on_lost_coverage, mask_after = coverage_flags.parse_coverage(arguments, repair_timeout)
    if experts is not None:
        logger.info(
            "%s", expert_slots.describe_capacity(experts, (experts + redundant) // ranks, ranks, on_lost_coverage)
        )
    spares = arguments.eep_spares or 0
    if spares < 0:
        raise SystemExit(f"--eep-spares {spares}: give 0 or more")
    if spares and _one_device_each():
        raise SystemExit(
            "--eep-spares does not go together with SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS: a spare looks for devices before "
            "it knows which rank it will be; unset the variable, or leave out --eep-spares"
        )
    keeps_context = arguments.eep_keep_context != "off"
    keeps_weights = arguments.eep_keep_weights != "off"
    return ServerOptions(
        ranks=ranks,
        max_ranks=max_ranks,
        fewest_ranks=1 if experts is None else expert_slots.fewest_ranks(experts, (experts + redundant) // ranks),
        timeout_ms=timeout,
        repair_timeout_s=repair_timeout,
        stall_timeout_s=choose_stall_timeout(arguments.eep_stall_timeout_s, timeout),
        hang_timeout_s=choose_hang_timeout(arguments.eep_hang_timeout_s),
        experts=experts,
        portion_tokens=portion_flag.parse_portion(arguments.eep_portion_tokens),
        redundant_experts=expert_slots.redundant_in_all(redundant, experts, ranks, max_ranks),
        backup=arguments.eep_backup or "off",
        store=store,
        host=host,
        on_lost_coverage=on_lost_coverage,
        most_slots=coverage_flags.parse_room(
            arguments, on_lost_coverage, experts, ((experts or 0) + redundant) // ranks
        ),
        mask_after_s=mask_after,
        balance=balance_flags.parse_balance(arguments),
        shadows=arguments.eep_shadow_copies == "on",
        hardware=hardware_flags.parse_hardware(arguments, device_of(arguments)),
        relaunch=arguments.eep_relaunch != "off",
        faults=arguments.eep_faults == "on",
        json_log=getattr(arguments, "log_requests_format", None) == "json",
        traces=bool(getattr(arguments, "enable_trace", False)),
        seeded=draws_by_seed(arguments),
        spares=spares,
        keeps_context=keeps_context,
        keeps_weights=keeps_weights,
        anchor=anchor_flag.parse_anchor(arguments.eep_anchor, keeps_weights=keeps_weights),
        kv_backup=kv_backup.parse_backup(arguments.eep_kv_backup, keeps_context=keeps_context),
        running_per_rank=sglang_flags.running(arguments) // ranks,
        max_queued=getattr(arguments, "max_queued_requests", None),
        shares_gpu=device_of(arguments) != "cpu"
        and gpu_sharing.are_shared(arguments, max_ranks if host is None else host.ranks_each),
    )


def draws_by_seed(arguments: argparse.Namespace) -> bool:
    """Whether sampling can go by seeds. Torch's operators can, and a CPU has no others; SGLang's faster ones cannot."""
    return (
        bool(getattr(arguments, "enable_deterministic_inference", False))
        or getattr(arguments, "sampling_backend", None) == "pytorch"
        or device_of(arguments) == "cpu"
    )


def require_cores(max_ranks: int, cores: str) -> None:
    """SystemExit if ``cores``, one group per rank, leave out ranks that may be added."""
    if cores and cores != "all" and (groups := cores.count("|") + 1) < max_ranks:
        raise SystemExit(
            f"{_CORES}={cores} names cores for {groups} ranks, but there may be {max_ranks}; name a group of cores for each "
            "rank, separated by |"
        )


def _one_device_each() -> bool:
    return os.environ.get("SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS", "").lower() in ("1", "true", "yes", "y")


def device_of(arguments: argparse.Namespace) -> str:
    if getattr(arguments, "device", None):
        return str(arguments.device)
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
