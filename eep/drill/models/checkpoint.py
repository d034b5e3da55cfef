"""Writes a random checkpoint with a byte-level tokenizer.

The same seed gives the same bytes. Its answers mean nothing, but they depend on every expert, so a wrong one shows.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from eep.drill.models import block_fp8
from eep.drill.models.byte_tokenizer import END, VOCABULARY, make_tokenizer
from eep.drill.models.deepseek_v3 import DEEPSEEK_V3
from eep.drill.models.family import Family
from eep.drill.models.glm4_moe import GLM4_MOE
from eep.drill.models.gpt_oss import GPT_OSS
from eep.drill.models.model_sizes import SIZES, Size
from eep.drill.models.qwen3 import QWEN3

CONTEXT = 8192
FAMILIES = {"qwen3": QWEN3, "deepseek-v3": DEEPSEEK_V3, "glm4-moe": GLM4_MOE, "gpt-oss": GPT_OSS}


def make_model(
    path: str | os.PathLike[str],
    seed: int = 0,
    size: str = "tiny",
    *,
    family: str = "qwen3",
    fp8: bool = False,
    context: int = CONTEXT,
) -> Path:
    """Write the checkpoint into the directory ``path``, which may exist if it is empty. ``fp8``: its experts in that.
    ``context``: how many tokens a prompt and its answer may have; the weights do not depend on it."""
    if size not in SIZES:
        raise ValueError(f"there is no size {size!r} of model: choose from {', '.join(SIZES)}")
    if family not in FAMILIES:
        raise ValueError(f"there is no family {family!r} of models: choose from {', '.join(FAMILIES)}")
    if fp8 and not FAMILIES[family].has_block_fp8:
        raise ValueError(
            f"experts of {family} are not published in fp8 with a scale for each block: choose another family, or no fp8"
        )
    folder = write_model(path, SIZES[size], seed, context, FAMILIES[family])
    if fp8:
        block_fp8.rewrite_checkpoint(folder)
    return folder


def write_model(
    path: str | os.PathLike[str], size: Size, seed: int = 0, context: int = CONTEXT, family: Family = QWEN3
) -> Path:
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty directory: name another, or remove it")
    import torch

    # Its types are not what it does.
    transformers: Any = importlib.import_module("transformers")
    config = getattr(transformers, family.configuration)(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_experts_per_tok=size.top_k,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        initializer_range=size.spread,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
        **family.settings(size),
    )
    random_state = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = getattr(transformers, family.architecture)(config)
        family.fill(model)
    finally:
        torch.set_rng_state(random_state)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
