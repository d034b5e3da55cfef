"""Clients of several hosts that try again: what a router before the front ends does, or a client that knows them all.

A client asks each host in turn. When an answer does not come to its end, it asks the next host for the same, and what it got
before must be how the next answer begins.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from collections.abc import Callable, Sequence

from eep.drill.load import Load, ask
from eep.drill.query_answers import Answer

PAUSE_S = 0.2
GIVES_UP_AFTER_S = 300.0


class RetryingLoad(Load):
    """``urls()``: where the hosts are now. Every other client takes its answers whole, the others as a stream."""

    def __init__(
        self,
        urls: Callable[[], Sequence[str]],
        prompts: Sequence[Sequence[int]],
        wanted: Sequence[Sequence[int]],
        clients: int = 8,
    ) -> None:
        super().__init__(urls()[0], prompts, wanted, clients)
        self._urls = urls
        self.retries: list[Answer] = []
        """Answers that did not come to their end, and were asked for again."""

    @property
    def misled(self) -> list[Answer]:
        """Those of which a part came that is wrong."""
        return [each for each in self.retries if each.tokens != list(self.wanted_tokens(each))[: len(each.tokens)]]

    def is_streamed(self, answer: Answer) -> bool:
        return len(answer.times) > 1

    def _ask(self, client: int, number: int, rank: int | None) -> Answer:
        end, host = time.monotonic() + GIVES_UP_AFTER_S, number
        while True:
            urls = self._urls()
            answer = self._ask_once(urls[host % len(urls)], number % len(self.prompts), streamed=client % 2 == 0)
            if not answer.problem or time.monotonic() > end:
                return answer
            self.retries.append(answer)
            host += 1
            time.sleep(PAUSE_S)

    def _ask_once(self, url: str, which: int, *, streamed: bool) -> Answer:
        wanted = self.wanted[which]
        if streamed:
            return ask(url, self.prompts[which], len(wanted), number=which)
        return ask_whole(url, self.prompts[which], len(wanted), which)


def ask_whole(url: str, prompt: Sequence[int], tokens: int, number: int, timeout: float = 120.0) -> Answer:
    """As ``ask``, for an answer that comes in one piece. Never raises: see ``problem``."""
    answer = Answer(number, time.monotonic())
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = json.dumps({"input_ids": list(prompt), "sampling_params": sampling}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            told = json.load(reply)
        answer.tokens, answer.times = list(told["output_ids"]), [time.monotonic()]
        answer.usage = (int(told["meta_info"]["prompt_tokens"]), int(told["meta_info"]["completion_tokens"]))
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        answer.problem = f"{type(error).__name__}: {error}"
    if not answer.problem and len(answer.tokens) != tokens:
        answer.problem = f"{len(answer.tokens)} tokens instead of {tokens}"
    return answer
