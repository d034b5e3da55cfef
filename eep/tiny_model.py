"""A small random Qwen3-MoE checkpoint with a byte-level tokenizer, to serve where a real model does not fit.

The same seed gives the same bytes. Its answers mean nothing, but they depend on every expert, so a wrong one shows.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

EXPERTS, TOP_K, LAYERS, HIDDEN, VOCABULARY = 16, 4, 4, 256, 512
_BYTES = 256
_END = "<|end|>"


def make_model(path: str | os.PathLike[str], seed: int = 0) -> Path:
    """Write the checkpoint into the directory ``path``, which may exist if it is empty."""
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty directory: name another, or remove it")
    import torch

    # Its types are not what it does.
    transformers: Any = importlib.import_module("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        moe_intermediate_size=HIDDEN // 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        # Wider than usual, so that the answers vary and a single wrong expert changes most of them.
        initializer_range=0.2,
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
