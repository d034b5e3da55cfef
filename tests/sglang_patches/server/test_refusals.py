"""What ``--ep-backend eep`` refuses, with the reason."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from eep.drill.models.checkpoint import FAMILIES
from eep.errors import EepError
from sglang_patches.server import flags, refusals
from tests.sglang_patches.server.arguments import given, with_model


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pp_size": 2}, "--pp-size"),
        ({"tp_size": 1, "dp_size": 1, "ep_size": 1}, "at least 2"),
        ({"dist_init_addr": "127.0.0.1:5000"}, "--dist-init-addr"),
        ({"decoupled_spec_role": "drafter"}, "--decoupled-spec-role"),
        ({"grpc_port": 50051}, "--grpc-port"),
        ({"grpc_mode": True}, "--grpc-mode"),
        ({"smg_grpc_mode": True}, "--smg-grpc-mode"),
        ({"use_ray": True}, "--use-ray"),
        ({"encoder_only": True}, "--encoder-only"),
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
        ({"eplb_algorithm": "deepseek"}, "--eplb-algorithm"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend"),
        ({"disaggregation_mode": "prefill"}, "disaggregation"),
        ({"chunked_prefill_size": -1}, "--chunked-prefill-size"),
        ({"eep_store": "localhost:2379"}, "named like http://127.0.0.1:2379"),
        ({"eep_store": "http://127.0.0.1:none"}, "--eep-store"),
        ({"eep_store": ""}, "--eep-store"),
        ({"eep_store": "http://me:secret@127.0.0.1:2379"}, "--eep-store-password-file"),
        ({"eep_store": "http://127.0.0.1:9"}, "127.0.0.1:9 cannot be reached"),
        ({"eep_max_ranks": 3}, "--eep-max-ranks"),
        ({"eep_max_ranks": 5}, "the number of experts cannot be read"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num"),
        ({"detokenizer_worker_num": 2}, "--detokenizer-worker-num"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"lora_paths": ["a"]}, "--lora-paths"),
        ({"enable_prefill_delayer": True}, "--enable-prefill-delayer"),
        ({"enable_expert_distribution_metrics": True}, "how balanced"),
        ({"expert_balancedness_report_mode": "both"}, "how balanced"),
        ({"enable_custom_logit_processor": True}, "--disable-overlap-schedule"),
        ({"max_queued_requests": -1}, "--max-queued-requests"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
        ({"eep_timeout_ms": 0.0}, "--eep-timeout-ms"),
        ({"eep_repair_timeout_s": 0.0}, "--eep-repair-timeout-s"),
        ({"eep_stall_timeout_s": 5.0}, "--eep-stall-timeout-s 5: give 0 to turn it off, or 20 s or more"),
        ({"eep_stall_timeout_s": 30.0, "eep_timeout_ms": 20000.0}, "--eep-stall-timeout-s 30: .* 40 s or more"),
        ({"eep_stall_timeout_s": -1.0}, "--eep-stall-timeout-s"),
        ({"eep_redundant_experts": -1}, "--eep-redundant-experts"),
        ({"eep_spares": -1}, "--eep-spares"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(SystemExit, match=reason):
        flags.parse(given(**changes))


@pytest.mark.parametrize(
    ("name", "value"), [("SGLANG_GRPC_PORT", "50051"), ("SGLANG_RUST_SERVER", "true"), ("SGLANG_RUST_SERVER", "1")]
)
def test_no_variable_opens_a_way_past_the_guard_of_the_routes(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=f"{name}={value} .* unset the variable"):
        flags.parse(given())


@pytest.mark.parametrize(("name", "value"), [("SGLANG_GRPC_PORT", ""), ("SGLANG_RUST_SERVER", "false")])
def test_a_variable_that_opens_no_way_past_the_guard_is_let_through(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    flags.parse(given())


def test_a_backup_needs_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    def require() -> None:
        raise EepError("the backup service needs Mooncake: pip install 'eep[backup]'")

    monkeypatch.setattr("eep.experts.backup.transfer_engine.require_mooncake", require)
    with pytest.raises(SystemExit, match="--eep-backup live: the backup service needs Mooncake: pip install"):
        flags.parse(given(eep_backup="live"))
    assert flags.parse(given(eep_backup="off")).backup == "off"


def test_a_machine_without_pidfds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(SystemExit, match=r"--ep-backend eep: .*seccomp profile allow pidfd_open"):
        flags.parse(given())


@pytest.mark.parametrize("named", [*([each] for each in refusals.RUN), [], None, "not a list"])
def test_models_that_were_run_and_those_that_do_not_say_what_they_are(tmp_path: Path, named: Any) -> None:
    flags.parse(with_model(tmp_path, {"num_experts": 16, "architectures": named}))


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("MixtralForCausalLM", "add up their parts"),
        ("DeepseekV2ForCausalLM", "nobody has compared"),
        ("DeepseekV32ForCausalLM", "keeps an index"),
        ("NewModelForCausalLM", "not known to leave the exchange"),
    ],
)
def test_other_models_are_refused_by_name_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, reason: str
) -> None:
    known = with_model(tmp_path, {"num_experts": 16, "architectures": [named]})
    with pytest.raises(SystemExit, match=rf"cannot serve {named}: .*{reason}.*Qwen3MoeForCausalLM.*EEP_ANY_MODEL=1"):
        flags.parse(known)
    monkeypatch.setenv("EEP_ANY_MODEL", "1")
    flags.parse(known)


def test_every_family_that_can_be_made_is_served() -> None:
    assert {family.architecture for family in FAMILIES.values()} == set(refusals.RUN)


def test_experts_in_mxfp4_are_refused(tmp_path: Path) -> None:
    told = {
        "num_local_experts": 16,
        "architectures": ["GptOssForCausalLM"],
        "quantization_config": {"quant_method": "mxfp4"},
    }
    with pytest.raises(SystemExit, match=r"MXFP4.*in bfloat16"):
        flags.parse(with_model(tmp_path, told))


@pytest.mark.parametrize(("cores", "enough"), [("0|1|0|1", True), ("", True), ("all", True), ("0-3|4-7", False)])
def test_every_rank_that_may_be_added_needs_cores(cores: str, enough: bool) -> None:
    if enough:
        flags.require_cores(4, cores)
    else:
        with pytest.raises(SystemExit, match="for 2 ranks, but there may be 4"):
            flags.require_cores(4, cores)


@pytest.mark.parametrize("name", ["EEP_DRAIN_S", "EEP_RELAUNCH_LIMIT"])
@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_variable_that_is_no_good_number_is_refused_at_start(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(SystemExit, match=f"{name}={text}: give a number"):
        flags.parse(given())
