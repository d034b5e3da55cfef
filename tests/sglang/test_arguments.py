"""The command line: what is refused and why, what is implied, and that without the flag nothing changes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_patches import arguments

GOOD: dict[str, Any] = {
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
    "disable_shared_experts_fusion": False,
    "max_running_requests": None,
    "eep_max_ranks": None,
    "eep_timeout_ms": None,
    "eep_redundant_experts": None,
    "eep_backup": None,
    "eep_store": None,
    "eep_on_lost_coverage": None,
    "eep_relaunch": None,
    "eep_faults": None,
}


def given(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**GOOD, **changes})


def test_the_defaults() -> None:
    options = arguments.parse(given())
    assert (options.max_ranks, options.timeout_ms, options.redundant_experts) == (4, 1000.0, 0)
    assert (options.backup, options.on_lost_coverage, options.relaunch) == ("off", "refuse", True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pp_size": 2}, "--pp-size"),
        ({"tp_size": 1, "dp_size": 1, "ep_size": 1}, "at least 2"),
        ({"dp_size": 2}, "--dp-size must equal --tp-size"),
        ({"ep_size": 2}, "--ep-size"),
        ({"enable_dp_attention": False}, "--enable-dp-attention"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"enable_two_batch_overlap": True}, "overlap"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend"),
        ({"disaggregation_mode": "prefill"}, "disaggregation"),
        ({"chunked_prefill_size": -1}, "--chunked-prefill-size"),
        ({"eep_backup": "live"}, "--eep-backup"),
        ({"eep_on_lost_coverage": "mask"}, "--eep-on-lost-coverage"),
        ({"eep_max_ranks": 3}, "--eep-max-ranks"),
        ({"eep_max_ranks": 5}, "more than the 4 ranks"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num"),
        ({"eep_timeout_ms": 0.0}, "--eep-timeout-ms"),
        ({"eep_redundant_experts": -1}, "--eep-redundant-experts"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(SystemExit, match=reason):
        arguments.parse(given(**changes))


def test_what_the_flag_implies() -> None:
    known = given(eep_redundant_experts=8)
    arguments.imply(known, arguments.parse(known))
    assert known.disable_overlap_schedule
    assert known.enable_dp_lm_head
    assert known.moe_dense_tp_size == 1
    assert known.ep_num_redundant_experts == 8
    assert known.max_running_requests > 0


def with_model(folder: Path, configuration: dict[str, Any], **changes: Any) -> argparse.Namespace:
    (folder / "config.json").write_text(json.dumps(configuration))
    return given(model_path=str(folder), **changes)


@pytest.mark.parametrize("configuration", [{"num_experts": 16}, {"text_config": {"n_routed_experts": 16}}])
def test_by_default_the_others_have_room_for_all_experts_when_one_rank_is_lost(
    tmp_path: Path, configuration: dict[str, Any]
) -> None:
    redundant = arguments.parse(with_model(tmp_path, configuration)).redundant_experts
    slots_per_rank, rest = divmod(16 + redundant, 4)
    assert rest == 0
    assert 3 * slots_per_rank >= 16 > 3 * (slots_per_rank - 1), "as many as it takes, and no more"


@pytest.mark.parametrize(
    ("changes", "redundant"),
    [({"eep_redundant_experts": 0}, 0), ({"ep_num_redundant_experts": 4}, 4), ({"eep_redundant_experts": 48}, 48)],
)
def test_redundant_experts_as_asked_for(tmp_path: Path, changes: dict[str, Any], redundant: int) -> None:
    assert arguments.parse(with_model(tmp_path, {"num_experts": 16}, **changes)).redundant_experts == redundant


def test_slots_that_ranks_cannot_share_evenly_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"22 slots, which 4 ranks cannot share evenly; ask for 8 or 4"):
        arguments.parse(with_model(tmp_path, {"num_experts": 16}, eep_redundant_experts=6))


def test_a_model_whose_experts_are_not_known_is_for_sglang_to_judge(tmp_path: Path) -> None:
    assert arguments.parse(with_model(tmp_path, {"hidden_size": 8}, eep_redundant_experts=3)).redundant_experts == 3


_PARSE = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import prepare_server_args
parsed = prepare_server_args(sys.argv[1:])
loaded = sorted(name for name in sys.modules if name.startswith("sglang.srt"))
print("RESULT", json.dumps([repr(parsed), sorted(HookRegistry._patched), loaded]))
"""


def run_python(code: str, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_without_the_flag_nothing_changes(sglang: None, model: Path) -> None:
    """The same arguments with the plugin and with plugins turned off: the same result, the same modules, and only the
    command line hooked."""
    # Version 0.5.17 would draw a seed each time.
    argv = ["--model-path", str(model), "--device", "cpu", "--tp-size", "2", "--random-seed", "1"]
    outputs = []
    for plugins in ("eep", "none-of-this-name"):
        result = run_python(_PARSE, *argv, SGLANG_PLUGINS=plugins)
        line = next((line for line in result.stdout.splitlines() if line.startswith("RESULT")), None)
        assert line is not None, result.stderr[-3000:]
        outputs.append(json.loads(line.removeprefix("RESULT")))
    ours, stock = outputs
    assert ours[0] == stock[0]
    assert set(ours[1]) == {f"sglang.srt.server_args.ServerArgs.{name}" for name in ("add_cli_args", "from_cli_args")}
    assert stock[1] == []
    assert ours[2] == stock[2]


def test_the_flags_are_in_the_help(sglang: None) -> None:
    result = run_python(_PARSE, "--help")
    for flag in ("--ep-backend", "--eep-max-ranks", "--eep-on-lost-coverage", "--eep-relaunch"):
        assert flag in result.stdout, result.stderr[-2000:]


def test_our_flags_need_the_first_of_them(sglang: None, model: Path) -> None:
    result = run_python(_PARSE, "--model-path", str(model), "--eep-max-ranks", "8")
    assert result.returncode != 0
    assert "--ep-backend eep" in result.stderr
