"""Which ranks the controller sends to, and what it forgets when one is gone. The event log has no part in it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from eep.membership import Launch, Notify, Phase, RankGone, Transition
from eep.view import View
from sglang_patches.addressed_life import address
from sglang_patches.server.controller import _route, mark_the_dead
from sglang_patches.server.outbox import Outbox
from sglang_patches.server.server_ranks import LiveRanks

BOTH = View(1, (0, 1), (0, 0))


def running() -> LiveRanks:
    ranks = LiveRanks(range(4))
    for effect in (Launch(0, 0, ""), Launch(1, 0, ""), Notify(BOTH, Phase.RUN)):
        ranks.follow(effect)
    return ranks


def test_a_rank_that_is_gone_is_no_longer_live() -> None:
    ranks = running()
    assert ranks.live == {0: 0, 1: 0}
    ranks.follow(RankGone(1, 0, "it exited"))
    assert ranks.live == {0: 0}
    assert list(ranks.ended) == [1]


def test_ranks_of_other_hosts_get_nothing_from_here() -> None:
    ranks = LiveRanks((2, 3))
    ranks.follow(Notify(View(1, (0, 1, 2), (0, 0, 0, 0)), Phase.RUN))
    assert ranks.live == {2: 0}


def test_a_late_record_does_not_bring_a_gone_life_back() -> None:
    ranks = running()
    ranks.follow(RankGone(1, 0, "it exited"))
    ranks.follow(Notify(BOTH, Phase.RUN))
    assert ranks.live == {0: 0}
    ranks.follow(Launch(1, 1, ""))
    ranks.follow(Notify(View(3, (0, 1), (0, 1)), Phase.RUN))
    assert ranks.live == {0: 0, 1: 1}


def test_what_is_for_a_life_that_ended_is_not_sent_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sglang.srt.managers.data_parallel_controller")
    sent: list[tuple[str, str]] = []
    module.sock_send = lambda socket, message: sent.append((socket, message.rid))  # type: ignore[attr-defined]
    package = ModuleType("sglang.srt.managers")
    package.data_parallel_controller = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.managers", package)
    ranks = running()
    controller = SimpleNamespace(workers=["socket 0", "socket 1"], _eep_ranks=SimpleNamespace(lives=ranks))
    for effect in (RankGone(1, 0, "it exited"), Launch(1, 1, ""), Notify(View(3, (0, 1), (0, 1)), Phase.RUN)):
        ranks.follow(effect)
    for name, life in (("late", 0), ("for the next", 1), ("for one that is not known yet", 2)):
        message = SimpleNamespace(rid=name, routed_dp_rank=1)
        address(message, life)
        assert _route(controller, message)
    assert sent == [("socket 1", "for the next"), ("socket 1", "for one that is not known yet")]


def test_lines_of_the_event_log_change_nothing() -> None:
    ranks = running()
    for phase in ("DYING", "FENCING", "EXITED"):
        ranks.follow(Transition(phase, 1, "", rank=1, incarnation=0))
    assert ranks.live == {0: 0, 1: 0}
    assert not ranks.ended


def test_what_waited_for_a_rank_is_forgotten_with_each_of_its_lives() -> None:
    def blocked(socket: Any, message: Any, flags: int = 0) -> None:
        import zmq

        raise zmq.Again

    ranks, outbox = running(), Outbox(blocked)
    controller = SimpleNamespace(workers=["socket 0", "socket 1"], status=[False, False])
    outbox("socket 0", "stays")
    for effect in (RankGone(1, 0, "it exited"), Launch(1, 1, "")):
        outbox("socket 1", "for the life that ended")
        ranks.follow(effect)
        mark_the_dead(controller, ranks, outbox)
        assert id(controller.workers[1]) not in outbox._unsent, effect
    assert list(outbox._unsent[id(controller.workers[0])]) == ["stays"]
    assert controller.status == [True, False]
    assert controller._active_workers == [0]
