"""What the clients of a drill ask for: prompts of many lengths and every kind of request, decided by a seed alone.

Faults that one kind of request never meets show with another: a long prompt is prefilled in several chunks while other ranks
decode, a batch arrives as one request, a stop string ends an answer in the middle of a token. So a drill mixes them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

_WORDS = (
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "sigma",
)
_TOKENS = [token for token in range(3, 500) if token != 256]
"""Those of the small random models, without the one that ends a text."""


@dataclass(frozen=True, slots=True)
class Query:
    """One request, and what is known of its answer before it is asked."""

    number: int
    kind: str
    path: str
    body: dict[str, Any]
    prompt: tuple[int, ...] = ()
    """Its tokens, where the request gives tokens and not text."""
    tokens: int = 0
    """How many it asks for, all parts of a batch together."""

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def is_greedy(self) -> bool:
        """Whether its tokens can be followed one by one: a single greedy answer of which the server sends the numbers."""
        return self.kind == "greedy"


@dataclass(frozen=True, slots=True)
class RequestMix:
    """How long prompts and answers are, and how many requests there are."""

    greedy: int = 112
    """How many different greedy requests; those of other kinds are in proportion. All together they are more than the
    prefix cache of a rank holds. Otherwise the ranks soon hardly prefill, and a drill finds little."""
    prompts: tuple[tuple[float, int, int], ...] = ((0.5, 3, 60), (0.27, 60, 400), (0.23, 1000, 3200))
    """Shares of prompts, and between which lengths these are."""
    shared: tuple[int, ...] = (90, 300, 700)
    """Lengths of beginnings that several prompts share."""
    with_shared: float = 0.18
    """The share of prompts that begin with one of them."""
    answers: tuple[int, int] = (8, 160)
    """The shortest and the longest answer."""


REQUEST_MIXES = {
    # Two cores: what a GPU does in a second takes a minute.
    "cpu": RequestMix(16, ((0.6, 3, 40), (0.3, 40, 160), (0.1, 300, 600)), (30, 120), answers=(4, 40)),
    "cuda": RequestMix(),
}
"""By the name of a device (:mod:`eep.drill.devices`)."""


@dataclass
class _Maker:
    """Makes the requests of a mix, one after the other."""

    mix: RequestMix
    choose: random.Random
    made: list[Query] = field(default_factory=list)
    beginnings: list[list[int]] = field(default_factory=list)

    def tokens(self, count: int) -> list[int]:
        return self.choose.choices(_TOKENS, k=count)

    def prompt(self) -> list[int]:
        if self.beginnings and self.choose.random() < self.mix.with_shared:
            return self.choose.choice(self.beginnings) + self.tokens(self.choose.randint(1, 80))
        shares = [share for share, _, _ in self.mix.prompts]
        _, low, high = self.choose.choices(self.mix.prompts, shares)[0]
        return self.tokens(self.choose.randint(low, high))

    def length(self) -> int:
        """Of an answer: four of ten are in the first quarter of the range."""
        low, high = self.mix.answers
        quarter = max(low, high // 4)
        return self.choose.randint(low, quarter) if self.choose.random() < 0.4 else self.choose.randint(quarter, high)

    def native(self, kind: str, *, stream: bool = True, sampling: dict[str, Any] | None = None, **more: Any) -> None:
        prompt, tokens = self.prompt(), self.length()
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **(sampling or {})}
        body = {"input_ids": prompt, "stream": stream, "sampling_params": parameters, **more}
        self.made.append(Query(len(self.made), kind, "/generate", body, tuple(prompt), tokens))

    def batch(self, size: int = 3) -> None:
        prompts, tokens = [self.prompt() for _ in range(size)], self.length()
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompts, "stream": False, "sampling_params": parameters}
        self.made.append(Query(len(self.made), "batch", "/generate", body, (), size * tokens))

    def of_openai(self, *, chat: bool, seeded: bool) -> None:
        text = " ".join(self.choose.choices(_WORDS, k=self.choose.choice((3, 12, 40))))
        tokens = self.length()
        body: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if seeded:
            body |= {"temperature": 0.9, "seed": self.choose.randrange(1, 1 << 30)}
        if chat:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        path = "/v1/chat/completions" if chat else "/v1/completions"
        self.made.append(Query(len(self.made), "chat" if chat else "completion", path, body, (), tokens))


def make_queries(mix: RequestMix, seed: int) -> list[Query]:
    """The requests of a mix. The same seed gives the same ones."""
    maker = _Maker(mix, random.Random(seed))
    maker.beginnings = [maker.tokens(length) for length in mix.shared]
    choose = maker.choose
    for _ in range(mix.greedy):
        maker.native("greedy")
    for _ in range(max(1, mix.greedy // 4)):
        drawn: dict[str, Any] = {
            "temperature": choose.choice((0.5, 0.8, 1.0)),
            "sampling_seed": choose.randrange(1, 1 << 30),
        }
        drawn |= choose.choice(({}, {"top_p": 0.9}, {"top_k": 20}, {"top_k": 40, "top_p": 0.95}))
        maker.native("seeded", sampling=drawn)
    for _ in range(max(1, mix.greedy // 14)):
        maker.native("penalty", sampling={"frequency_penalty": 0.7, "presence_penalty": 0.2})
        maker.native("logprob", return_logprob=True)
        maker.native("whole", stream=False)
    for _ in range(max(1, mix.greedy // 28)):
        maker.batch()
    for number in range(max(2, mix.greedy // 7)):
        maker.of_openai(chat=bool(number % 2), seeded=number % 3 == 2)
    return maker.made


def with_stop_strings(queries: Sequence[Query], texts: Sequence[str], most: int = 3) -> list[Query]:
    """Requests like the first greedy ones, each with a stop string that its answer (``texts``) has in its middle. The server
    decides from the text alone where it is, so the string must stand there for the first time."""
    found: list[Query] = []
    for query, text in zip(queries, texts, strict=True):
        if len(found) == most:
            break
        if not query.is_greedy or (stop := _stop_string(text)) is None:
            continue
        body = copy.deepcopy(query.body)
        body["sampling_params"]["stop"] = stop
        found.append(replace(query, number=len(queries) + len(found), kind="stop", body=body))
    return found


def _stop_string(text: str, length: int = 3) -> str | None:
    for at in range(len(text) // 2, len(text) - length):
        part = text[at : at + length]
        if "�" not in part and text.index(part) == at:
            return part
    return None
