"""Clients that ask for a mix of requests, again and again, and hold every answer against the fault-free one."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Sequence

from eep.drill.load import Load
from eep.drill.query_answers import Answer, difference, put
from eep.drill.references import Reference

_GOES_AWAY = 24
"""One client of so many leaves some of its answers before their end."""


class MixedLoad(Load):
    """Which client asks for what is decided by the seed."""

    def __init__(
        self,
        url: str,
        known: Sequence[Reference],
        clients: int,
        seed: int,
        *,
        ranks: int | None = None,
        exact: bool = True,
    ) -> None:
        """``ranks``: each client names one of so many ranks that is to serve it; otherwise the server chooses. ``exact``: an
        answer must be as it was; otherwise only as long."""
        if not known:
            raise ValueError("a mixed load needs at least one request with a known answer")
        prompts, wanted = [each.query.prompt for each in known], [each.answer.tokens for each in known]
        super().__init__(url, prompts, wanted, clients, ranks)
        self.known, self.exact = known, exact
        self._name = f"drill-{uuid.uuid4().hex[:8]}"
        self._of_number = {each.query.number: each for each in known}
        self._choices = [random.Random(seed * 1000 + client) for client in range(clients)]

    def wanted_of(self, answer: Answer) -> Answer:
        """The fault-free answer to the same request."""
        return self._of_number[answer.prompt].answer

    def wanted_tokens(self, answer: Answer) -> Sequence[int]:
        return self.wanted_of(answer).tokens

    def is_streamed(self, answer: Answer) -> bool:
        return self._of_number[answer.prompt].query.is_streamed

    def kind_of(self, answer: Answer) -> str:
        return self._of_number[answer.prompt].query.kind

    def what_is_wrong(self, answer: Answer) -> str:
        """Nothing, if the answer is as it should be."""
        if answer.problem:
            return ""
        wanted = self.wanted_of(answer)
        if self.exact:
            return difference(wanted, answer)
        if answer.is_cut or self.kind_of(answer) == "stop" or wanted.usage == answer.usage:
            return ""
        return f"usage: {answer.usage}, should be {wanted.usage}"

    def is_wrong(self, answer: Answer) -> bool:
        return bool(self.what_is_wrong(answer))

    def alike(self) -> float:
        """The share of whole answers that are just as they were without a fault."""
        whole = [answer for answer in list(self.answers) if not answer.problem and not answer.is_cut]
        return sum(not difference(self.wanted_of(answer), answer) for answer in whole) / max(1, len(whole))

    def by_kind(self) -> dict[str, int]:
        return dict(Counter(map(self.kind_of, list(self.answers))))

    def _ask(self, client: int, number: int, rank: int | None) -> Answer:
        choose = self._choices[client]
        query = choose.choice(self.known).query
        may_leave = client % _GOES_AWAY == _GOES_AWAY - 1 and query.is_greedy and query.tokens > 3
        cut_after = choose.randint(1, query.tokens - 2) if may_leave else None
        return put(self.url, query, cut_after=cut_after, rank=rank, name=f"{self._name}-{number}")
