"""Clients of a running server that check every token they get.

Each client asks for one prompt after the other and streams the answer. What a prompt's answer is was asked before any
fault; afterwards every answer must be the same, token by token. Nothing is asked twice: a request that fails has failed.
Uses nothing but the standard library, so that it runs wherever Python does.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from eep.drill.query_answers import Answer, new_tokens, stream

TOKENS = 24
"""How many tokens a request asks for, by default."""


def ask(
    url: str,
    prompt: Sequence[int],
    tokens: int = TOKENS,
    *,
    number: int = 0,
    timeout: float = 120.0,
    rank: int | None = None,
    seen: Callable[[int], None] = lambda tokens: None,
    **sampling: Any,
) -> Answer:
    """One streamed request to ``/generate``, greedy unless ``sampling`` says otherwise; ``rank`` is to serve it, if it is in.
    ``seen`` is told how many tokens have come, whenever some have. Never raises: see ``problem``."""
    answer = Answer(number, time.monotonic(), rank=rank)
    body = {
        "input_ids": list(prompt),
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling},
        **({} if rank is None else {"routed_dp_rank": rank}),
    }
    try:
        for chunk in stream(url, "/generate", body, timeout):
            if "error" in chunk:
                answer.problem = str(chunk["error"])
                break
            now = time.monotonic()
            fresh = new_tokens(chunk, len(answer.tokens))
            answer.tokens += fresh
            answer.times += [now] * len(fresh)
            seen(len(answer.tokens))
            meta = chunk.get("meta_info") or {}
            answer.usage = (int(meta.get("prompt_tokens", 0)), int(meta.get("completion_tokens", len(answer.tokens))))
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.problem = f"{type(error).__name__}: {error}"
    if not answer.problem and len(answer.tokens) != tokens:
        answer.problem = f"{len(answer.tokens)} tokens instead of {tokens}"
    return answer


class Load:
    """``clients`` of them at once, until stopped."""

    def __init__(
        self,
        url: str,
        prompts: Sequence[Sequence[int]],
        wanted: Sequence[Sequence[int]],
        clients: int = 8,
        ranks: int | None = None,
    ) -> None:
        """``wanted[i]`` is the fault-free answer to ``prompts[i]``. ``ranks``: each client names one of so many ranks that is
        to serve it; otherwise the server chooses."""
        self.url, self.prompts, self.wanted, self._ranks = url, prompts, wanted, ranks
        self.answers: list[Answer] = []
        self._next = iter(range(10**9))
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(each,), daemon=True) for each in range(clients)]

    @classmethod
    def with_reference(
        cls,
        url: str,
        prompts: Sequence[Sequence[int]],
        *,
        tokens: int = TOKENS,
        clients: int = 8,
        ranks: int | None = None,
    ) -> Load:
        """Asks for every prompt once, before any fault, to know what the answers are."""
        wanted = []
        for number, prompt in enumerate(prompts):
            answer = ask(url, prompt, tokens, number=number)
            if answer.problem:
                raise RuntimeError(f"prompt {number} has no fault-free answer: {answer.problem}")
            wanted.append(answer.tokens)
        return cls(url, prompts, wanted, clients, ranks)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, within: float = 180.0) -> None:
        """No new requests; waits for those under way."""
        self._stopping.set()
        end = time.monotonic() + within
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if stuck := sum(thread.is_alive() for thread in self._threads):
            raise TimeoutError(f"{stuck} clients got no end of their answer within {within:.0f} s")

    def __enter__(self) -> Load:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.problem]

    @property
    def wrong(self) -> list[Answer]:
        """Answers that came whole, but not as they should be."""
        return [answer for answer in list(self.answers) if not answer.problem and self.is_wrong(answer)]

    def is_wrong(self, answer: Answer) -> bool:
        return answer.tokens != list(self.wanted_tokens(answer))

    def is_streamed(self, answer: Answer) -> bool:
        """Whether its tokens come as they are made."""
        return True

    def wanted_tokens(self, answer: Answer) -> Sequence[int]:
        """Those of the fault-free answer to the same request."""
        return self.wanted[answer.prompt]

    def token_times(self) -> list[float]:
        return sorted(moment for answer in list(self.answers) for moment in answer.times)

    def largest_gap(self, since: float, until: float, of: Callable[[Answer], bool] = lambda answer: True) -> float:
        """The longest that any client waited for its next token, of the waits that touch this time, in answers of a kind.
        One that comes whole at its end has no next token."""
        gaps = [0.0]
        for answer in filter(of, filter(self.is_streamed, list(self.answers))):
            moments = [answer.started, *answer.times]
            for earlier, later in pairwise(moments):
                if later >= since and earlier <= until:
                    gaps.append(later - earlier)
        return max(gaps)

    def _client(self, client: int) -> None:
        rank = None if self._ranks is None else client % self._ranks
        while not self._stopping.is_set():
            with self._lock:
                number = next(self._next)
            answer = self._ask(client, number, rank)
            with self._lock:
                self.answers.append(answer)
            if answer.problem:
                time.sleep(0.1)  # a server that refuses must not be flooded

    def _ask(self, client: int, number: int, rank: int | None) -> Answer:
        """The request of that number, of a client, which may name a rank."""
        which = number % len(self.prompts)
        return ask(self.url, self.prompts[which], len(self.wanted[which]), number=which, rank=rank)
