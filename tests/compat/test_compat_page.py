"""docs/compat.md names every call and attribute of the interfaces of other libraries, and none that there is not."""

from __future__ import annotations

import dataclasses
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch.distributed as dist

from eep.compat import deep_ep, nixl_ep
from tests.compat.deep_ep_ranks import Fleet

PAGE = Path(__file__).parents[2] / "docs" / "compat.md"
ABSENT = {"engram_*", "pp_*", "agrs_*", "all_gather", "ht_*"}
INHERITED = {"send_again", "send_back", "meet_in_normal_mode", "num_sms"}
"""What one face has for another, and a number that is named by its setter."""
INSIDE = {"normal", "recv_topk_idx", "slots"}
"""What a handle has for its combine."""


def tables() -> dict[str, set[str]]:
    """The names in the first column of each table, by heading."""
    found: dict[str, set[str]] = {}
    heading = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("|"):
            _, call, here, *_ = line.split("|")
            names = re.findall(r"`([\w*]+)", call if call.strip() != "not in DeepEP" else here)
            found.setdefault(heading, set()).update(names)
    return found


def calls(face: type) -> set[str]:
    return {name for name in dir(face) if not name.startswith("_")} - INHERITED


def attributes(of: object) -> set[str]:
    return {name for name in vars(of) if not name.startswith("_")}


def play_compares(group: dist.ProcessGroup) -> None:
    """The names of the page are those of the classes and of what their constructors leave in the objects."""
    handle = {field.name for field in dataclasses.fields(deep_ep.EPHandle)} - INSIDE
    elastic = attributes(deep_ep.ElasticBuffer(group))
    for heading, face, module, has in (
        ("DeepEP: `Buffer`", deep_ep.Buffer, deep_ep, attributes(deep_ep.Buffer(group))),
        ("DeepEP: `ElasticBuffer` and `EPHandle`", deep_ep.ElasticBuffer, deep_ep, elastic | handle),
        ("NIXL: `Buffer`", nixl_ep.Buffer, nixl_ep, attributes(nixl_ep.Buffer())),
    ):
        named, there = tables()[heading], calls(face) | has
        assert there - named == set(), heading
        assert named - there - set(module.__all__) - ABSENT == set(), heading
        assert not [name for name in there for absent in named & ABSENT if fnmatch(name, absent)], heading


def test_the_tables(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_compares, 1))


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        (
            "DeepEP: `Buffer`",
            "rank group group_size num_nvl_bytes num_rdma_bytes low_latency_mode explicitly_destroy enable_shrink runtime",
        ),
        (
            "DeepEP: `ElasticBuffer` and `EPHandle`",
            "group rank_idx num_ranks allow_hybrid_mode allow_multiple_reduction prefer_overlap_with_compute num_bytes "
            "num_max_tokens_per_rank num_scaleout_ranks num_scaleup_ranks scaleout_rank_idx scaleup_rank_idx "
            "num_rdma_ranks num_nvlink_ranks runtime do_expand num_experts expert_alignment num_sms topk_idx "
            "psum_num_recv_tokens_per_scaleup_rank psum_num_recv_tokens_per_expert num_recv_tokens_per_expert_list "
            "num_unaligned_recv_tokens_per_expert recv_src_metadata dst_buffer_slot_idx token_metadata_at_forward "
            "channel_linked_list num_recv_tokens",
        ),
        ("NIXL: `Buffer`", "rank group_size explicitly_destroy group comm tcp_store_group runtime"),
    ],
)
def test_the_attributes_that_the_other_library_names_are_there(heading: str, names: str) -> None:
    assert set(names.split()) - tables()[heading] == set()
