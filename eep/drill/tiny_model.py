"""A random Qwen3-MoE checkpoint with a byte-level tokenizer, to serve where a real model does not fit.

The same seed gives the same bytes. Its answers mean nothing, but they depend on every expert, so a wrong one shows.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eep.drill import block_fp8

VOCABULARY = 512
CONTEXT = 8192
_BYTES = 256
_END = "<|end|>"


@dataclass(frozen=True)
class Size:
    experts: int
    top_k: int
    layers: int
    hidden: int
    moe_intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    spread: float
    """Standard deviation of the weights. Wider than usual, so that the answers vary and a single wrong expert changes most
    of them; narrower as sums get longer, so that they do not grow from layer to layer."""

    def __str__(self) -> str:
        return f"{self.experts} experts, top-{self.top_k}, {self.layers} layers, hidden {self.hidden}"


SIZES = {
    # 15 MB, for a CPU.
    "tiny": Size(16, 4, 4, 256, 128, 4, 2, 64, spread=0.2),
    # 140 MB: made and loaded in seconds, for drills on a GPU.
    "small": Size(16, 4, 4, 1024, 256, 8, 4, 128, spread=0.1),
    # 2.6 GB, and three times that in memory while it is made: work enough for a GPU to be measured with.
    "large": Size(32, 8, 8, 2048, 768, 16, 4, 128, spread=0.07),
}


def make_model(
    path: str | os.PathLike[str], seed: int = 0, size: str = "tiny", *, fp8: bool = False, context: int = CONTEXT
) -> Path:
    """Write the checkpoint into the directory ``path``, which may exist if it is empty. ``fp8``: its experts in that.
    ``context``: how many tokens a prompt and its answer may have; the weights do not depend on it."""
    if size not in SIZES:
        raise ValueError(f"there is no size {size!r} of model: choose from {', '.join(SIZES)}")
    folder = write_model(path, SIZES[size], seed, context)
    if fp8:
        block_fp8.rewrite_checkpoint(folder)
    return folder


def write_model(path: str | os.PathLike[str], size: Size, seed: int = 0, context: int = CONTEXT) -> Path:
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty directory: name another, or remove it")
    import torch

    # Its types are not what it does.
    transformers: Any = importlib.import_module("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        moe_intermediate_size=size.moe_intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        num_experts=size.experts,
        num_experts_per_tok=size.top_k,
        norm_topk_prob=True,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        initializer_range=size.spread,
        bos_token_id=None,
        eos_token_id=_BYTES,
        pad_token_id=_BYTES,
    )
    random_state = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    finally:
        torch.set_rng_state(random_state)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    """One token per byte, one that ends a text, and the rest of the vocabulary as names that no text contains."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    transformers: Any = importlib.import_module("transformers")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, _END, *(f"<|{number}|>" for number in range(_BYTES + 1, VOCABULARY))]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END, special=True)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_END,
        chat_template="{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    )
