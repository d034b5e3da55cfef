"""The command line: what is refused and why, what is implied, and that without the flag nothing changes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from eep.errors import EepError
from sglang_patches.cuda import gpu_sharing, implied_flags
from sglang_patches.server import controller, expert_slots, flags

GOOD: dict[str, Any] = {
    "device": "cpu",
    "tp_size": 4,
    "dp_size": 4,
    "ep_size": 4,
    "pp_size": 1,
    "nnodes": 1,
    "enable_dp_attention": True,
    "disable_overlap_schedule": False,
    "moe_a2a_backend": "none",
    "ep_num_redundant_experts": 0,
    "moe_dense_tp_size": None,
    "enable_dp_lm_head": False,
    "enable_dp_attention_local_control_broadcast": False,
    "disable_custom_all_reduce": False,
    "disable_radix_cache": False,
    "disable_shared_experts_fusion": False,
    "max_running_requests": None,
    "eep_max_ranks": None,
    "eep_timeout_ms": None,
    "eep_repair_timeout_s": None,
    "eep_redundant_experts": None,
    "eep_backup": None,
    "eep_store": None,
    "eep_on_lost_coverage": None,
    "eep_relaunch": None,
    "eep_faults": None,
    "eep_spares": None,
}


def given(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**GOOD, **changes})


def test_the_defaults() -> None:
    options = flags.parse(given())
    assert (options.max_ranks, options.timeout_ms, options.redundant_experts) == (4, 1000.0, 0)
    assert controller.policy(options).settle_deadline == 120.0
    assert (options.backup, options.on_lost_coverage, options.relaunch) == ("off", "refuse", True)


@pytest.mark.parametrize(
    ("changes", "seeded"),
    [
        ({"device": "cpu"}, True),
        ({"device": "cuda"}, False),
        ({"device": "cuda", "sampling_backend": "pytorch"}, True),
        ({"device": "cuda", "sampling_backend": "flashinfer"}, False),
        ({"device": "cuda", "enable_deterministic_inference": True}, True),
    ],
)
def test_where_sampling_goes_by_seeds(changes: dict[str, Any], seeded: bool) -> None:
    assert flags.parse(given(**changes)).seeded is seeded


@pytest.mark.parametrize(
    ("gpus", "ranks", "changes", "shared"),
    [
        (1, 4, {}, True),
        (8, 8, {}, False),
        (8, 9, {}, True),
        (8, 4, {"base_gpu_id": 4}, False),
        (8, 4, {"base_gpu_id": 6}, False),  # the last two are on the first two
        (8, 8, {"gpu_id_step": 2}, True),
        (0, 1, {}, False),
    ],
)
def test_whether_ranks_share_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, changes: dict[str, int], shared: bool
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert gpu_sharing.are_shared(argparse.Namespace(**changes), ranks) is shared


def test_kernels_for_experts_on_a_gpu() -> None:
    known = given(device="cuda", dtype="bfloat16", moe_runner_backend="auto", disable_prefill_cuda_graph=False)
    implied_flags.imply_gpu_flags(known)
    assert (known.moe_runner_backend, known.disable_prefill_cuda_graph) == ("triton", True)
    known.moe_runner_backend = "deep_gemm"
    implied_flags.imply_gpu_flags(known)
    assert known.moe_runner_backend == "deep_gemm"
    known.moe_runner_backend = "flashinfer_cutlass"
    with pytest.raises(SystemExit, match="choose from triton, deep_gemm"):
        implied_flags.imply_gpu_flags(known)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pp_size": 2}, "--pp-size"),
        ({"tp_size": 1, "dp_size": 1, "ep_size": 1}, "at least 2"),
        ({"dp_size": 2}, "--dp-size must equal --tp-size"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk"),
        ({"enable_hierarchical_cache": True}, "outside of the device"),
        ({"enable_lmcache": True}, "outside of the device"),
        ({"ep_dispatch_algorithm": "static"}, "--ep-dispatch-algorithm"),
        ({"enable_memory_saver": True}, "--enable-memory-saver"),
        ({"ep_size": 2}, "--ep-size"),
        ({"enable_dp_attention": False}, "--enable-dp-attention"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"enable_two_batch_overlap": True}, "overlap"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend"),
        ({"disaggregation_mode": "prefill"}, "disaggregation"),
        ({"chunked_prefill_size": -1}, "--chunked-prefill-size"),
        ({"eep_store": "localhost:2379"}, "named like http://127.0.0.1:2379"),
        ({"eep_store": "http://127.0.0.1:none"}, "--eep-store"),
        ({"eep_store": ""}, "--eep-store"),
        ({"eep_store": "http://me:secret@127.0.0.1:2379"}, "not supported"),
        ({"eep_store": "http://127.0.0.1:9"}, "127.0.0.1:9 cannot be reached"),
        ({"eep_max_ranks": 3}, "--eep-max-ranks"),
        ({"eep_max_ranks": 5}, "the number of experts cannot be read"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"lora_paths": ["a"]}, "--lora-paths"),
        ({"enable_prefill_delayer": True}, "--enable-prefill-delayer"),
        ({"enable_expert_distribution_metrics": True}, "how balanced"),
        ({"expert_balancedness_report_mode": "both"}, "how balanced"),
        ({"enable_custom_logit_processor": True}, "--disable-overlap-schedule"),
        ({"max_queued_requests": 100}, "--max-queued-requests"),
        ({"eep_timeout_ms": 0.0}, "--eep-timeout-ms"),
        ({"eep_repair_timeout_s": 0.0}, "--eep-repair-timeout-s"),
        ({"eep_redundant_experts": -1}, "--eep-redundant-experts"),
        ({"eep_spares": -1}, "--eep-spares"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(SystemExit, match=reason):
        flags.parse(given(**changes))


def test_a_backup_needs_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    def require() -> None:
        raise EepError("the backup service needs Mooncake: pip install 'eep[backup]'")

    monkeypatch.setattr("eep.experts.backup.transfer_engine.require", require)
    with pytest.raises(SystemExit, match="--eep-backup live: the backup service needs Mooncake: pip install"):
        flags.parse(given(eep_backup="live"))
    assert flags.parse(given(eep_backup="off")).backup == "off"


def test_what_is_asked_for_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eep.experts.backup.transfer_engine.require", lambda: None)
    known = given(eep_backup="checkpoint", eep_on_lost_coverage="mask", eep_repair_timeout_s=900.0)
    options = flags.parse(known)
    assert controller.policy(options).settle_deadline == 900.0
    assert (options.backup, options.on_lost_coverage) == ("checkpoint", "mask")
    flags.imply(known, options)
    assert known.disable_radix_cache, "what was computed without some experts is not for those who come later"


def test_spares_are_off_unless_asked_for_and_need_to_see_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flags.parse(given()).spares == 0
    assert flags.parse(given(eep_spares=2)).spares == 2
    monkeypatch.setenv("SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS", "true")
    assert flags.parse(given(eep_spares=0)).spares == 0
    with pytest.raises(SystemExit, match="which rank it will be"):
        flags.parse(given(eep_spares=1))


def test_what_the_flag_implies() -> None:
    known = given(eep_redundant_experts=8)
    flags.imply(known, flags.parse(known))
    assert not known.disable_overlap_schedule
    assert known.enable_dp_lm_head
    assert known.moe_dense_tp_size == 1
    assert known.ep_num_redundant_experts == 8
    assert known.max_running_requests > 0


def with_model(folder: Path, configuration: dict[str, Any], **changes: Any) -> argparse.Namespace:
    (folder / "config.json").write_text(json.dumps(configuration))
    return given(model_path=str(folder), **changes)


@pytest.mark.parametrize("named", [["Qwen3MoeForCausalLM"], [], None, "not a list"])
def test_models_that_were_run_and_those_that_do_not_say_what_they_are(tmp_path: Path, named: Any) -> None:
    flags.parse(with_model(tmp_path, {"num_experts": 16, "architectures": named}))


def test_a_model_that_was_not_run_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags.parse(with_model(tmp_path, {"n_routed_experts": 16, "architectures": ["DeepseekV3ForCausalLM"]}))
    assert "has not been run with DeepseekV3ForCausalLM" in caplog.text


def test_a_model_whose_ranks_would_add_up_different_requests_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = with_model(tmp_path, {"num_experts": 16, "architectures": ["MixtralForCausalLM"]})
    with pytest.raises(SystemExit, match=r"cannot serve MixtralForCausalLM.*Qwen3MoeForCausalLM.*EEP_ANY_MODEL=1"):
        flags.parse(known)
    monkeypatch.setenv("EEP_ANY_MODEL", "1")
    flags.parse(known)


@pytest.mark.parametrize("configuration", [{"num_experts": 16}, {"text_config": {"n_routed_experts": 16}}])
def test_by_default_the_others_have_room_for_all_experts_when_one_rank_is_lost(
    tmp_path: Path, configuration: dict[str, Any]
) -> None:
    redundant = flags.parse(with_model(tmp_path, configuration)).redundant_experts
    slots_per_rank, rest = divmod(16 + redundant, 4)
    assert rest == 0
    assert 3 * slots_per_rank >= 16 > 3 * (slots_per_rank - 1), "as many as it takes, and no more"


@pytest.mark.parametrize(
    ("slots_per_rank", "when_short", "said"),
    [
        (4, "refuse", "16 slots, 4 on each of 4 ranks: every rank is needed; while one is lost, all wait"),
        (
            6,
            "refuse",
            "24 slots, 6 on each of 4 ranks: any one rank may be lost, and the others hold every expert;",
        ),
        (
            8,
            "mask",
            "any 2 ranks may be lost, and the others hold every expert; with more lost, those that are left serve",
        ),
        (16, "refuse", "any 3 ranks may be lost, and the last one still holds every expert"),
    ],
)
def test_what_the_slots_are_enough_for_is_stated(slots_per_rank: int, when_short: str, said: str) -> None:
    assert said in expert_slots.describe_capacity(16, slots_per_rank, 4, when_short)


@pytest.mark.parametrize(
    ("changes", "redundant"),
    [({"eep_redundant_experts": 0}, 0), ({"ep_num_redundant_experts": 4}, 4), ({"eep_redundant_experts": 48}, 48)],
)
def test_redundant_experts_as_asked_for(tmp_path: Path, changes: dict[str, Any], redundant: int) -> None:
    assert flags.parse(with_model(tmp_path, {"num_experts": 16}, **changes)).redundant_experts == redundant


def test_slots_that_ranks_cannot_share_evenly_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"22 slots, which 4 ranks cannot share evenly; ask for 8 or 4"):
        flags.parse(with_model(tmp_path, {"num_experts": 16}, eep_redundant_experts=6))


def test_ranks_that_may_be_added_change_nothing_for_each_of_the_first(tmp_path: Path) -> None:
    """SGLang is told of all that there may be, and divides by them; each rank has what it has without the others."""
    two = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "chunked_prefill_size": 1000, "max_running_requests": 101}
    shares = []
    for more in ({}, {"eep_max_ranks": 5}):
        known = with_model(tmp_path, {"num_experts": 16}, **two, **more)
        options = flags.parse(known)
        flags.imply(known, options)
        assert options.ranks == 2
        assert known.tp_size == known.dp_size == known.ep_size == options.max_ranks
        slots = 16 + known.ep_num_redundant_experts
        divided = (slots, known.chunked_prefill_size, known.max_running_requests)
        shares.append([each // options.max_ranks for each in divided])
        assert slots % options.max_ranks == 0
    assert shares == [[16, 500, 50]] * 2


@pytest.mark.parametrize(("redundant", "fewest"), [(0, 4), (8, 3), (48, 1)])
def test_how_many_ranks_it_takes_to_hold_every_expert(tmp_path: Path, redundant: int, fewest: int) -> None:
    known = with_model(tmp_path, {"num_experts": 16}, eep_redundant_experts=redundant, eep_max_ranks=6)
    assert flags.parse(known).fewest_ranks == fewest


@pytest.mark.parametrize(("cores", "enough"), [("0|1|0|1", True), ("", True), ("all", True), ("0-3|4-7", False)])
def test_every_rank_that_may_be_added_needs_cores(cores: str, enough: bool) -> None:
    if enough:
        flags.require_cores(4, cores)
    else:
        with pytest.raises(SystemExit, match="for 2 ranks, but there may be 4"):
            flags.require_cores(4, cores)


def test_a_model_whose_experts_are_not_known_is_for_sglang_to_judge(tmp_path: Path) -> None:
    assert flags.parse(with_model(tmp_path, {"hidden_size": 8}, eep_redundant_experts=3)).redundant_experts == 3


_PARSE = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
prepare_server_args(sys.argv[1:])
"""


def run_python(code: str, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_triton_takes_tokens_that_are_quantised_already() -> None:
    """By the name of our backend SGLang finds none of its kernels that do; with the hook it finds them, and only those."""
    code = """
from sglang_patches import cpu, hooks
from sglang_patches.rank import dispatcher
cpu.fill_gaps()
from sglang.srt.layers.moe.moe_runner import triton
from sglang.srt.layers.moe.moe_runner.base import FusedOpPool
assert FusedOpPool.get_fused_func("mooncake", "triton") is None
hooks.hook("layers.moe.moe_runner.base.FusedOpPool.get_fused_func", dispatcher._kernels_in_one)
hooks.apply()
assert FusedOpPool.get_fused_func("mooncake", "triton") is triton.fused_experts_none_to_triton
assert FusedOpPool.get_fused_func("mooncake", "deep_gemm") is None
"""
    done = run_python(code, EEP_CPU_GAPS="1", SGLANG_USE_CPU_ENGINE="1")
    assert done.returncode == 0, done.stderr[-2000:]


_COMPARE = """
import json, os, pkgutil, sys, types
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import prepare_server_args
parsed = prepare_server_args(sys.argv[1:])
loaded = sorted(name for name in sys.modules if name.startswith("sglang.srt"))
environment = {name: value for name, value in os.environ.items() if name != "SGLANG_PLUGINS"}

# All that the plugin would hook is imported, and then nothing in SGLang may be of the plugin's making.
from sglang_patches import cpu, targets
cpu.fill_gaps()  # for both: without it there is nothing to import on a machine without a GPU
for target in targets.TARGETS:
    if target.is_in(targets.installed_version()) and not target.on_gpu:
        pkgutil.resolve_name(targets.PREFIX + target.name)

def is_ours(value):
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    if not isinstance(value, types.FunctionType):
        return str(type(value).__module__).startswith("sglang_patches")
    code = value.__code__
    return "sglang_patches" in code.co_filename or code.co_qualname.startswith("_wrap_fn.")

ours = set()
for name, module in list(sys.modules.items()):
    if name.startswith("sglang."):
        for attribute, value in list(vars(module).items()):
            if is_ours(value):
                ours.add(f"{name}.{attribute}")
            if isinstance(value, type) and value.__module__ == name:
                ours.update(f"{name}.{attribute}.{each}" for each, held in list(vars(value).items()) if is_ours(held))
print("RESULT", json.dumps([repr(parsed), loaded, environment, sorted(HookRegistry._patched), sorted(ours)]))
"""


@pytest.mark.timeout(600)  # SGLang is imported twice
def test_without_the_flag_nothing_changes(sglang: None, model: Path) -> None:
    """The same arguments with the plugin and with plugins turned off: the same result, the same modules, the same
    environment, and of all names in SGLang only those of the command line are hooked."""
    # Version 0.5.17 would draw a seed each time.
    argv = ["--model-path", str(model), "--device", "cpu", "--tp-size", "2", "--random-seed", "1"]

    def outcome(plugins: str) -> list[Any]:
        result = run_python(_COMPARE, *argv, SGLANG_PLUGINS=plugins)
        line = next((line for line in result.stdout.splitlines() if line.startswith("RESULT")), None)
        assert line is not None, result.stderr[-3000:]
        found: list[Any] = json.loads(line.removeprefix("RESULT"))
        return found

    with ThreadPoolExecutor(2) as both:
        ours, stock = both.map(outcome, ("eep", "none-of-this-name"))
    command_line = {f"sglang.srt.server_args.ServerArgs.{name}" for name in ("add_cli_args", "from_cli_args")}
    assert ours[:3] == stock[:3]
    assert (set(ours[3]), stock[3]) == (command_line, [])
    assert set(ours[4]) == {*stock[4], *command_line}, "beside those that stand in for what a CPU has not"


def test_the_flags_are_in_the_help(sglang: None) -> None:
    result = run_python(_PARSE, "--help")
    for flag in ("--ep-backend", "--eep-max-ranks", "--eep-on-lost-coverage", "--eep-relaunch"):
        assert flag in result.stdout, result.stderr[-2000:]


def test_our_flags_need_the_first_of_them(sglang: None, model: Path) -> None:
    result = run_python(_PARSE, "--model-path", str(model), "--eep-max-ranks", "8")
    assert result.returncode != 0
    assert "--ep-backend eep" in result.stderr
