"""A message belongs to the view in which it was seen. The endpoint is made up: with a real one, a view would have to change
between two lines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eep.process_group.gate import Gate
from eep.process_group.lane import Lane
from eep.view import View


class Context:
    """Takes note of what is called, and says that it is done."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def open_lane(self, *_: Any) -> int:
        return 0

    def probe(self, *_: Any) -> None:
        self.called.append("probe")

    def receive(self, *_: Any) -> bool:
        self.called.append("receive")
        return True


@pytest.fixture
def endpoint() -> Any:
    return SimpleNamespace(context=Context(), view=View(4, (0, 1), (0, 0)))


def test_what_was_seen_in_another_view_is_not_taken(endpoint: Any) -> None:
    lane = Lane(endpoint, Gate(), 1, [0, 1])
    assert lane.receive(4, 1, 0, 8, 1.0)
    endpoint.view = View(5, (0, 1), (0, 0))
    assert not lane.receive(4, 1, 0, 8, 1.0), "the first message of the next view is another"
    assert lane.probe(4, 2, 0, 1.0) is None
    assert endpoint.context.called == ["receive"]
    assert lane.receive(5, 1, 0, 8, 1.0)
    lane.probe(5, 2, 0, 1.0)
    assert endpoint.context.called == ["receive", "receive", "probe"]
