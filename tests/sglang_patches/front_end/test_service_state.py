from __future__ import annotations

import time

from sglang_patches.front_end import tokenizer_hooks
from sglang_patches.front_end.service_state import LONGEST_PAUSE_S, ServiceState
from tests.sglang_patches.front_end.front_end_server import Server


def served(fewest: int = 3) -> ServiceState:
    state = ServiceState(fewest)
    state.seen(4, True, 0.0)
    return state


def test_a_pause_of_milliseconds_is_no_reason_and_one_of_seconds_is() -> None:
    state = served()
    state.seen(3, False, 10.0)
    assert state.why_not_ready(3, 1, 10.1) is None
    state.seen(3, False, 14.0)
    assert "10 s" in str(state.why_not_ready(3, 1, 20.0)), "a second loss does not begin the pause anew"
    state.seen(3, True, 21.0)
    assert state.why_not_ready(3, 1, 21.0 + 2 * LONGEST_PAUSE_S) is None


def test_ranks_that_cannot_hold_every_expert_are_not_ready_though_their_view_runs() -> None:
    state = served()
    state.seen(2, True, 1.0)
    assert "3 are needed" in str(state.why_not_ready(2, 1, 1.0))
    assert "no rank is in" in str(state.why_not_ready(0, 1, 1.0))


def test_a_host_serves_with_its_own_ranks_and_counts_those_of_others() -> None:
    state = ServiceState(3)
    state.elsewhere = 2
    state.seen(1, True, 0.0)
    assert state.why_not_ready(1, 3, 1.0) is None
    state.seen(0, True, 1.0)
    assert "no rank of this host is in" in str(state.why_not_ready(0, 1, 1.0))
    assert state.why_unhealthy(10.0, 20.0) is not None


def test_a_rollout_waits_for_as_many_ranks_as_it_wants() -> None:
    assert served().why_not_ready(3, 3, 1.0) is None
    assert served().why_not_ready(3, 4, 1.0) == "3 of 4 ranks are in"


def test_a_server_that_drains_is_not_ready_and_healthy() -> None:
    state = served()
    state.draining = True
    assert state.why_not_ready(4, 1, 1.0) == "the server drains"
    assert state.why_unhealthy(300.0, 1.0) is None


def test_a_server_is_unhealthy_when_requests_begin_to_fail_for_want_of_ranks() -> None:
    state = served()
    state.seen(0, False, 10.0)
    assert state.why_unhealthy(300.0, 310.0) is None
    assert "301 s" in str(state.why_unhealthy(300.0, 311.0))
    state.seen(3, True, 312.0)
    assert state.why_unhealthy(300.0, 9999.0) is None


def test_a_rank_that_dies_before_it_was_in_stops_nothing() -> None:
    """No view follows its death, so nothing would say that the ranks run."""
    server = Server()
    server.view(1, r0=0, r1=0, r2=0)
    front_end, much_later = server.front_end, time.monotonic() + 1000
    front_end.service.seen(3, True, time.monotonic())
    tokenizer_hooks._apply_loss(front_end, 3, 0, False)
    assert front_end.service.why_not_ready(3, 1, much_later) is None
    tokenizer_hooks._apply_loss(front_end, 2, 0, False)
    assert front_end.service.why_not_ready(2, 1, much_later) is not None


def test_a_server_whose_ranks_all_serve_experts_only_is_not_ready() -> None:
    state = ServiceState(1)
    state.seen(2, True, 0.0, serving=0)
    assert "no rank that serves requests is in" in str(state.why_not_ready(2, 1, 0.1, experts_only=(0, 1)))
    assert state.why_unhealthy(10.0, 11.0) is not None, "requests have waited for too long"
    state.recount(2, 1, 12.0)
    assert state.why_unhealthy(10.0, 30.0) is None
