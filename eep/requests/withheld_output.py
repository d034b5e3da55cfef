"""What a request that moved produces again, and its client has. Pure.

A life that began anew repeats tokens; a life of either manner repeats text, which counts from its first output token.
"""

from __future__ import annotations

from eep.requests.request_records import LedgerEntry


def diverges(entry: LedgerEntry, tokens: tuple[int, ...]) -> bool:
    """Whether a life that began anew produced other tokens than its client has."""
    start = len(entry.delivered) - entry.withhold_tokens
    return any(mine != theirs for mine, theirs in zip(entry.delivered[start:], tokens, strict=False))


def withhold(entry: LedgerEntry, tokens: tuple[int, ...], text: str) -> tuple[tuple[int, ...], str, int]:
    """The tokens and text that the client does not have yet, and how many tokens it has already."""
    repeated = min(entry.withhold_tokens, len(tokens))
    entry.withhold_tokens -= repeated
    cut = min(entry.withhold_text, len(text))
    entry.withhold_text -= cut
    return tokens[repeated:], text[cut:], repeated
