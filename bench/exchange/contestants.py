"""Who may take part in the contest of rounds, and what is special about each."""

from __future__ import annotations

from typing import Any

FIXED = {"fixed": True, "unchecked": True, "unclosed": True}
CONTENDERS: dict[str, dict[str, Any]] = {
    "eep": {},
    "fixed": FIXED,
    "no table": {"fixed": True},
    "no check": {"unchecked": True},
    "no closing": {"unclosed": True},
    "overlap": {"overlaps": True},
    "overlap at once": {"overlaps": True, "at_once": True},
    "no fence": {"unfenced": True},
    "8 blocks": {"blocks": 8},
    "wide": {"wide": True},
    "room for 4096": {"capacity": 4096},
    "shared": {"shares_gpu": True},
    "by expert": {"layout": "expert"},
    "fp8 combine": {"combine": "fp8"},
}
TEXTS = {
    "eep": "a plain buffer with room for just these tokens",
    "fixed": "membership in launch parameters, no look for torn outboxes, no closing of sources: no rank may be lost",
    "no table": "membership in launch parameters",
    "no check": "no look for torn outboxes",
    "no closing": "no closing of sources",
    "overlap": "each kernel takes its place while the one before it ends",
    "overlap at once": "the same, and of up to 16 tokens before the one before it has heard from its peers",
    "no fence": "flags of a combine without a fence before them",
    "8 blocks": "at most so many thread blocks a kernel",
    "wide": "blocks of many threads for few tokens, too",
    "room for 4096": "a buffer for so many tokens",
    "shared": "kernels that wait leave room for other ranks",
    "by expert": "rows packed by expert",
    "fp8 combine": "outputs travel back as fp8, encoded by a kernel of its own",
}
FLASHINFER: dict[str, dict[str, Any]] = {
    "FlashInfer": {"overlaps": True},
    "FlashInfer 128": {"overlaps": True, "threads": 128},
    "FlashInfer 512": {"overlaps": True, "threads": 512},
    "FlashInfer apart": {},
}
FLASHINFER_TEXTS = {
    "FlashInfer": "its one-sided all-to-all, blocks of 256 threads, kernels that overlap; fp8 rows are encoded before",
    "FlashInfer 128": "the same with blocks of 128 threads",
    "FlashInfer 512": "the same with blocks of 512 threads",
    "FlashInfer apart": "with blocks of 256 threads, and kernels that do not overlap",
}
NVSHMEM: dict[str, dict[str, Any]] = {
    "NVSHMEM puts": {"way": "puts"},
    "NVSHMEM warp puts": {"way": "warp puts"},
    "NVSHMEM stores": {"way": "stores"},
}
NVSHMEM_TEXTS = {
    "NVSHMEM puts": "each row put by a block, there and back, with signals; the PEs are fixed, and none may be lost",
    "NVSHMEM warp puts": "the same with each row put by a warp",
    "NVSHMEM stores": "the same signals; rows stored through nvshmem_ptr, partial sums read through it",
}
