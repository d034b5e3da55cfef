"""A message belongs to the view in which it was seen. The endpoint is made up: with a real one, a view would have to change
between two lines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eep.process_group.gate import Gate
from eep.process_group.lane import Lane
from eep.view import View


class Library:
    """Takes note of what is called, and says that it is done."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def eep_lane_open(self, *_: Any) -> int:
        return 0

    def eep_probe(self, *_: Any) -> int:
        self.called.append("probe")
        return 0

    def eep_recv(self, *arguments: Any) -> int:
        self.called.append("recv")
        arguments[-1]._obj.value = 1
        return 0


@pytest.fixture
def endpoint() -> Any:
    return SimpleNamespace(_library=Library(), _context=None, view=View(4, (0, 1), (0, 0)))


def test_what_was_seen_in_another_view_is_not_taken(endpoint: Any) -> None:
    lane = Lane(endpoint, Gate(), 1, [0, 1])
    assert lane.receive(4, 1, 0, 8, 1.0)
    endpoint.view = View(5, (0, 1), (0, 0))
    assert not lane.receive(4, 1, 0, 8, 1.0), "the first message of the next view is another"
    assert lane.probe(4, 2, 0, 1.0) is None
    assert endpoint._library.called == ["recv"]
    assert lane.receive(5, 1, 0, 8, 1.0)
    lane.probe(5, 2, 0, 1.0)
    assert endpoint._library.called == ["recv", "recv", "probe"]
