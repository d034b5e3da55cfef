"""What a host makes of news from others: a death ends the epoch here, and the coordinator decides at once."""

from __future__ import annotations

import pytest

from eep.membership import (
    EVERY_HOST,
    Event,
    Exited,
    InstanceRecord,
    InstanceSeen,
    LeaseHeld,
    Life,
    News,
    NewsHeard,
    Phase,
    Policy,
    Propose,
    Publish,
    RankReport,
    Reject,
    Report,
    ReportsListed,
    Revoke,
    SetTimer,
    initial_state,
    news_of,
    step,
)
from eep.membership.effects import Effect
from eep.membership.state import HostState, LocalRank, RankStatus
from eep.view import View

VIEW = View(7, (0, 1, 2, 3), (0, 0, 2, 0))
OTHERS = Report("b#1", {2: RankReport(Life.READY, 2), 3: RankReport(Life.READY, 0)}, settled=7)


class TwoHosts:
    """Host a, with ranks 0 and 1. Host b has the others."""

    def __init__(self, coordinator: str) -> None:
        self.state: HostState = initial_state("a#1", (0, 1), Policy(max_ranks=4))
        alive = {rank: LocalRank(RankStatus.READY, 0, 7) for rank in (0, 1)}
        instance = InstanceRecord(9, VIEW, Phase.RUN, coordinator, ("a#1", "a#1", "b#1", "b#1"), (0, 0, 2, 0))
        self.state = HostState("a#1", self.state.policy, alive, settled=7)
        self.feed(LeaseHeld(), InstanceSeen(instance, 5), ReportsListed({"b": OTHERS}, EVERY_HOST, 6))

    def feed(self, *events: Event) -> list[Effect]:
        seen: list[Effect] = []
        for event in events:
            self.state, effects = step(self.state, event)
            seen += effects
        return seen


def test_a_death_elsewhere_ends_the_epoch_here_and_is_not_decided_here() -> None:
    host = TwoHosts("b#1")
    effects = host.feed(NewsHeard(News("b#1", {3: 0})))
    assert Revoke(7, "b says that rank 3 (incarnation 0) is dead") in effects
    assert not [effect for effect in effects if isinstance(effect, Propose)]


def test_the_coordinator_proposes_a_view_without_a_rank_that_its_host_says_is_dead() -> None:
    host = TwoHosts("a#1")
    proposed = [effect.instance for effect in host.feed(NewsHeard(News("b#1", {3: 0}))) if isinstance(effect, Propose)]
    assert [instance.view.active for instance in proposed] == [(0, 1, 2)]


def test_a_revoked_epoch_elsewhere_is_revoked_here() -> None:
    effects = TwoHosts("b#1").feed(NewsHeard(News("b#1", {}, 7)))
    assert Revoke(7, "b says that epoch 7 is revoked") in effects


@pytest.mark.parametrize(
    "news",
    [
        News("b#1", {0: 0}),
        News("b#1", {2: 1}),
        News("b#1", {2: 3}),
        News("b#1", {9: 0}),
        News("b#1", {}, 6),
        News("b#1", {}, 8),
        News("b#1"),
    ],
    ids=["our rank", "an earlier life", "a life to come", "no rank", "an old epoch", "a later epoch", "nothing"],
)
@pytest.mark.parametrize("coordinator", ["a#1", "b#1"])
def test_other_news_changes_nothing(news: News, coordinator: str) -> None:
    assert TwoHosts(coordinator).feed(NewsHeard(news)) == []


@pytest.mark.parametrize("ident", ["b#0", "c#1", "a#1"], ids=["an earlier supervisor", "a stranger", "ourselves"])
def test_news_of_a_supervisor_that_has_no_rank_is_refused(ident: str) -> None:
    host = TwoHosts("a#1")
    before = host.state
    (effect,) = host.feed(NewsHeard(News(ident, {2: 2, 3: 0}, 7)))
    assert isinstance(effect, Reject)
    assert effect.kind == "unknown-host"
    assert host.state == before


def test_late_news_takes_nothing_back() -> None:
    host = TwoHosts("b#1")
    host.feed(NewsHeard(News("b#1", {3: 0}, 7)), NewsHeard(News("b#1", {3: -1}, 3)), NewsHeard(News("b#1")))
    assert host.state.news["b"] == News("b#1", {3: 0}, 7)


def test_news_that_comes_before_its_record_counts_when_the_record_comes() -> None:
    host = TwoHosts("b#1")
    later = InstanceRecord(
        10, View(8, (0, 1, 2), (0, 0, 4, 0)), Phase.AGREED, "b#1", ("a#1", "a#1", "b#1", "b#1"), (0, 0, 4, 0)
    )
    host.feed(NewsHeard(News("b#1", {2: 4})))
    effects = host.feed(InstanceSeen(later, 7))
    assert Revoke(8, "b says that rank 2 (incarnation 4) is dead") in effects


def test_a_host_does_not_pass_on_what_it_heard() -> None:
    host = TwoHosts("b#1")
    host.feed(NewsHeard(News("b#1", {3: 0})))
    assert host.state.revoked == 7
    assert news_of(host.state).is_empty


def test_a_host_says_that_its_epoch_ended_when_nothing_follows_from_the_news() -> None:
    """The host that said so may have been wrong. This one holds its ranks, and needs another epoch."""
    host = TwoHosts("b#1")
    effects = host.feed(NewsHeard(News("b#1", {3: 0})))
    assert not [effect for effect in effects if isinstance(effect, Publish)]
    (timer,) = (effect for effect in effects if isinstance(effect, SetTimer))
    (published,) = (effect.report for effect in host.feed(timer.deadline) if isinstance(effect, Publish))
    assert published.revoked == 7


def test_a_host_says_at_once_what_it_saw_itself_after_the_news() -> None:
    host = TwoHosts("b#1")
    host.feed(NewsHeard(News("b#1", {3: 0})))
    (published,) = (effect.report for effect in host.feed(Exited(1, 0, "killed")) if isinstance(effect, Publish))
    assert published.revoked == 7
