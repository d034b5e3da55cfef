"""SGLang's own caches and tables in memory that outlives the process, one life after the other."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from eep.anchor.anchor import SOCKET
from eep.anchor.memory_holder import MemoryHolder
from tests.sglang_patches.server.test_command_line import run_python

LIVES = """
import json, os, sys
from types import SimpleNamespace
from sglang_patches import cpu, hooks
from sglang_patches.options import VARIABLE
cpu.fill_gaps()
import torch
from sglang_patches.rank import next_life
from sglang_patches.rank.kv import anchored_pool, host_copy, pool_hooks
pool_hooks.register()
hooks.apply()
from sglang.srt.mem_cache import memory_pool

def live(kind, free):
    pool = anchored_pool.pool_of("cpu")
    budget = pool_hooks._keep_budget(lambda *_: free, SimpleNamespace(device="cpu"))
    table = memory_pool.ReqToTokenPool(4, 16, "cpu", False)
    common = dict(size=32, page_size=1, dtype=torch.bfloat16, layer_num=3, device="cpu", enable_memory_saver=False)
    if kind == "heads":
        cache = memory_pool.MHATokenToKVPool(**common, head_num=2, head_dim=8)
        buffers = [*cache.k_buffer, *cache.v_buffer]
    else:
        cache = memory_pool.MLATokenToKVPool(**common, kv_lora_rank=16, qk_rope_head_dim=4)
        buffers = list(cache.kv_buffer)
    pointers = [each.data_ptr() for each in buffers]
    next_life.look_whether_free()
    assert pointers == [each.data_ptr() for each in buffers]
    print(json.dumps({
        "budget": budget,
        "shapes": [list(each.shape) for each in buffers],
        "were": [each.float().mean().item() for each in buffers],
        "is_kept": pool is not None and pool.cache is cache and all(
            a.data_ptr() == b.data_ptr() for a, b in zip(buffers, pool.layers, strict=True)),
        "is_usual": cache.device == "cpu" and cache.data_ptrs.tolist() == [each.data_ptr() for each in buffers],
        "is_copied": host_copy._copy is not None and host_copy._copy._thread.is_alive(),
        "table": [list(table.req_to_token.shape), int(table.req_to_token.abs().sum())],
    }), flush=True)
    table.req_to_token[1, 2] = 9
    for number, each in enumerate(buffers):
        each.fill_(number + 1)

for rank, life, kind, free, options in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        os.environ.update({"EEP_RANK": str(rank), "EEP_INCARNATION": str(life), VARIABLE: options})
        live(kind, free)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def lives(sglang: None, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two lives of two ranks find, and one of a rank that keeps nothing."""
    directory: Path = tmp_path_factory.mktemp("keeper")
    holder, (told, ends) = MemoryHolder(str(directory / SOCKET)), os.pipe()
    thread = threading.Thread(target=holder.wait, args=(told,), daemon=True)
    thread.start()
    keeps, copies, drops = (
        json.dumps({"ranks": 3, "max_ranks": 3, "keeps_context": keeps, "kv_backup": size})
        for keeps, size in ((True, 0), (True, 1 << 20), (False, 0))
    )
    plan = [
        *((0, 0, "heads", 1000, keeps), (0, 1, "heads", 600, keeps)),
        *((1, 0, "latent", 1000, copies), (1, 1, "latent", 600, copies), (2, 0, "heads", 1000, drops)),
    ]
    environment = {"EEP_CONTROL_DIR": str(directory), "EEP_CPU_GAPS": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    done = run_python(LIVES, json.dumps(plan), **environment)
    os.write(ends, b"x")
    thread.join(10)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(("first", "layers"), [(0, 6), (2, 3)], ids=["heads", "latent"])
def test_the_next_life_takes_over_what_the_last_one_had(lives: list[Any], first: int, layers: int) -> None:
    before, after = lives[first : first + 2]
    for life in (before, after):
        assert life["is_kept"]
        assert life["is_usual"]
        assert life["table"] == [[5, 16], 0]
        assert life["budget"] == 1000
    assert before["shapes"] == after["shapes"]
    assert before["were"] == [0.0] * layers
    assert after["were"] == [number + 1 for number in range(layers)]


def test_contexts_are_copied_where_that_is_wanted(lives: list[Any]) -> None:
    assert [life["is_copied"] for life in lives] == [False, False, True, True, False]


def test_nothing_is_kept_where_it_is_not_wanted(lives: list[Any]) -> None:
    assert not lives[4]["is_kept"]
    assert lives[4]["is_usual"]
