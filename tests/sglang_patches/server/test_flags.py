"""The command line: what the flags mean by default, and what they imply for SGLang's own."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from sglang_patches.cuda import gpu_sharing
from sglang_patches.cuda import implied_flags as gpu_flags
from sglang_patches.server import flags, server_ranks, sglang_flags
from tests.sglang_patches.server.arguments import given


def test_the_defaults() -> None:
    options = flags.parse(given())
    assert (options.max_ranks, options.timeout_ms, options.redundant_experts) == (4, 1000.0, 0)
    assert server_ranks.policy(options).settle_deadline == 120.0
    assert (options.backup, options.on_lost_coverage, options.relaunch) == ("off", "refuse", True)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 60.0),
        ({"eep_timeout_ms": 50_000.0}, 100.0),  # ranks that wait for a hung one are to suspect it first
        ({"eep_stall_timeout_s": 25.0}, 25.0),
        ({"eep_stall_timeout_s": 0.0}, 0.0),
    ],
)
def test_how_long_a_rank_may_stand_still(changes: dict[str, Any], seconds: float) -> None:
    assert server_ranks.policy(flags.parse(given(**changes))).stall_deadline == seconds


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 0.5),
        ({"device": "cuda"}, 0.5),
        ({"eep_hang_timeout_s": 5.0}, 5.0),
        ({"eep_hang_timeout_s": 0.0}, 0.0),
        ({"eep_stall_timeout_s": 0.0}, 0.0),  # whoever debugs a rank turns all of it off
    ],
)
def test_how_long_a_rank_may_sleep_without_a_reason(changes: dict[str, Any], seconds: float) -> None:
    assert server_ranks.policy(flags.parse(given(**changes))).hung_deadline == seconds


def test_how_many_tokens_cross_at_once() -> None:
    assert flags.parse(given()).portion_tokens is None
    assert flags.parse(given(eep_portion_tokens=128)).portion_tokens == 128


@pytest.mark.parametrize("tokens", [0, -1, 65536])
def test_a_portion_that_no_buffer_can_have_is_refused(tokens: int) -> None:
    with pytest.raises(SystemExit, match="--eep-portion-tokens"):
        flags.parse(given(eep_portion_tokens=tokens))


@pytest.mark.parametrize("seconds", [-1.0, 0.1, float("nan"), 1e9])
def test_a_timeout_that_the_supervisor_cannot_keep_is_refused(seconds: float) -> None:
    with pytest.raises(SystemExit, match="--eep-hang-timeout-s"):
        flags.parse(given(eep_hang_timeout_s=seconds))


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
    gpu_flags.imply_gpu_flags(known)
    assert (known.moe_runner_backend, known.disable_prefill_cuda_graph) == ("triton", True)
    known.moe_runner_backend = "deep_gemm"
    gpu_flags.imply_gpu_flags(known)
    assert known.moe_runner_backend == "deep_gemm"
    known.moe_runner_backend = "flashinfer_cutlass"
    with pytest.raises(SystemExit, match="choose from triton, deep_gemm"):
        gpu_flags.imply_gpu_flags(known)


def test_what_is_asked_for_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eep.experts.backup.transfer_engine.require_mooncake", lambda: None)
    known = given(eep_backup="checkpoint", eep_on_lost_coverage="mask", eep_repair_timeout_s=900.0)
    options = flags.parse(known)
    assert server_ranks.policy(options).settle_deadline == 900.0
    assert (options.backup, options.on_lost_coverage) == ("checkpoint", "mask")
    sglang_flags.imply(known, options)
    assert known.disable_radix_cache, "what was computed without some experts is not for those who come later"


def test_spares_are_off_unless_asked_for_and_need_to_see_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flags.parse(given()).spares == 0
    assert flags.parse(given(eep_spares=2)).spares == 2
    monkeypatch.setenv("SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS", "true")
    assert flags.parse(given(eep_spares=0)).spares == 0
    with pytest.raises(SystemExit, match="which rank it will be"):
        flags.parse(given(eep_spares=1))


@pytest.mark.parametrize(
    ("changes", "keeps"),
    [
        ({"device": "cpu"}, True),
        ({"device": "cpu", "eep_keep_context": "off"}, False),
        ({"device": "cuda"}, True),
        ({"device": "cuda", "eep_keep_context": "off"}, False),
    ],
)
def test_whether_contexts_are_kept(changes: dict[str, Any], keeps: bool) -> None:
    assert flags.parse(given(**changes)).keeps_context is keeps


def test_contexts_are_copied_to_host_memory_if_asked_for() -> None:
    assert flags.parse(given(device="cpu")).kv_backup == 0
    assert flags.parse(given(device="cpu", eep_kv_backup="500MB")).kv_backup == 500 << 20
    assert flags.parse(given(device="cuda", eep_kv_backup="1.5GiB")).kv_backup == 3 << 29


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"eep_kv_backup": "much"}, "'much' is not a size"),
        ({"eep_kv_backup": "-1GiB"}, "is not a size"),
        ({"eep_kv_backup": "0"}, "more than 0 bytes"),
        ({"eep_kv_backup": "4096TiB"}, "more than the memory of this host"),
        ({"eep_kv_backup": "1GiB", "eep_keep_context": "off"}, "leave out one of them"),
    ],
)
def test_a_copy_that_there_cannot_be_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(SystemExit, match=why):
        flags.parse(given(**{"device": "cpu", **changes}))


def test_what_the_flag_implies() -> None:
    known = given(eep_redundant_experts=8)
    sglang_flags.imply(known, flags.parse(known))
    assert not known.disable_overlap_schedule
    assert known.enable_dp_lm_head
    assert known.moe_dense_tp_size == 1
    assert known.ep_num_redundant_experts == 8
    assert known.max_running_requests > 0


def test_the_front_end_bounds_the_queue_and_the_ranks_do_not() -> None:
    known = given(max_queued_requests=10, max_running_requests=64)
    options = flags.parse(known)
    sglang_flags.imply(known, options)
    assert known.max_queued_requests is None, "a rank would drop the requests of a lost one"
    assert [options.most_open(ranks) for ranks in (0, 3, 4, 5)] == [74, 74, 74, 90]
    assert flags.parse(given()).most_open(4) is None
