"""A tokenizer with one token per byte, which needs no data."""

from __future__ import annotations

import importlib
from typing import Any

VOCABULARY = 512
END = 256
"""The token that ends a text; those below it are the bytes."""
_END_NAME = "<|end|>"


def make_tokenizer() -> Any:
    """One token per byte, one that ends a text, and the rest of the vocabulary as names that no text contains."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # Its types are not what it does.
    transformers: Any = importlib.import_module("transformers")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, _END_NAME, *(f"<|{number}|>" for number in range(END + 1, VOCABULARY))]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END_NAME, special=True)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END_NAME,
        pad_token=_END_NAME,
        chat_template="{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    )
