"""The core says once for each life that a rank is gone, at the first sign of its end."""

from __future__ import annotations

import pytest

from eep.membership import (
    Action,
    Deadline,
    Event,
    EvidenceGiven,
    Exited,
    Failed,
    Fence,
    Leave,
    LossCause,
    OperatorAsked,
    PhaseChanged,
    PulseStopped,
    RankGone,
    Ready,
    Revoke,
    StopAsked,
    Timer,
    Transition,
)
from tests.membership.membership_host import Host, of_type

EXIT = Exited(1, 0, "SIGKILL")
PULSE = PulseStopped(1, 0)
FAILURE = Failed(1, 0, "IndexError: 7")
KILL = OperatorAsked("x", Action.KILL, 1)
LEAVE = Leave(1, 0)
EVIDENCE = EvidenceGiven("x", 1, "xid.79", fatal=True)
GRACE_IS_OVER = Deadline(Timer.LEAVE, 0, 1)


@pytest.mark.parametrize(
    ("events", "gone"),
    [
        ([EXIT], RankGone(1, 0, "rank 1 exited")),
        ([PULSE, EXIT], RankGone(1, 0, "rank 1 is dying")),
        ([FAILURE, PULSE, EXIT], RankGone(1, 0, "rank 1 failed: IndexError: 7", failed=True, kind=LossCause.EXCEPTION)),
        ([PULSE, FAILURE, EXIT], RankGone(1, 0, "rank 1 is dying")),
        ([KILL, EXIT], RankGone(1, 0, "an operator asked to kill rank 1", kind=LossCause.OPERATOR)),
        ([KILL, PULSE, EXIT], RankGone(1, 0, "an operator asked to kill rank 1", kind=LossCause.OPERATOR)),
        ([EVIDENCE, EXIT], RankGone(1, 0, "the hardware of rank 1 fails: xid.79", kind=LossCause.HARDWARE)),
        ([LEAVE, EXIT], RankGone(1, 0, "rank 1 exited", asked_to_leave=True, kind=LossCause.LEFT)),
        ([LEAVE, PULSE, EXIT], RankGone(1, 0, "rank 1 is dying", asked_to_leave=True, kind=LossCause.LEFT)),
        ([LEAVE, GRACE_IS_OVER, EXIT], RankGone(1, 0, "rank 1 had left but did not end", True, kind=LossCause.LATE)),
    ],
    ids=[
        "exit",
        "pulse",
        "failure",
        "pulse and failure",
        "fence",
        "fence and pulse",
        "evidence",
        "leave",
        "leave and pulse",
        "leave and fence",
    ],
)
def test_a_life_is_told_gone_once(events: list[Event], gone: RankGone) -> None:
    assert of_type(Host().run().feed(*events), RankGone) == [gone]


def test_a_rank_is_told_gone_in_the_step_of_the_first_sign() -> None:
    host = Host().run()
    effects = host.feed(PULSE)
    kinds = [type(effect) for effect in effects if isinstance(effect, Revoke | Fence | RankGone)]
    assert kinds[:3] == [Revoke, Fence, RankGone], "the waits of the survivors end first"
    assert not of_type(host.feed(EXIT), RankGone)


def test_each_life_has_an_end_of_its_own() -> None:
    host = Host().run()
    host.feed(EXIT)
    host.settle()
    host.feed(Ready(1, 1))
    host.settle()
    assert of_type(host.feed(Exited(1, 1, "SIGKILL")), RankGone) == [RankGone(1, 1, "rank 1 exited")]


def test_a_stop_ends_every_life() -> None:
    host = Host().run()
    effects = [*host.feed(StopAsked()), *host.feed(*[Exited(rank, 0, "SIGKILL") for rank in range(4)])]
    assert [effect.rank for effect in effects if isinstance(effect, RankGone)] == [0, 1, 2, 3]


def test_each_phase_of_the_instance_is_told_beside_its_log_line() -> None:
    host = Host().run()
    host.feed(EXIT)
    host.settle()
    told = [(effect.phase, effect.epoch) for effect in host.seen if isinstance(effect, PhaseChanged)]
    logged = [(e.phase, e.epoch) for e in host.seen if isinstance(e, Transition) and e.rank == -1]
    assert told == logged
    assert [phase for phase, _ in told][-4:] == ["REVOKED", "AGREED", "REPAIRED", "RUN"]


def test_the_line_of_a_revoked_epoch_says_what_revoked_it() -> None:
    causes = {"rank 1 exited: SIGKILL": EXIT, "rank 1 is dying": PULSE, "rank 1 is being fenced: an operator": KILL}
    for cause, event in causes.items():
        host = Host().run()
        host.feed(event)
        (line,) = [e for e in host.seen if isinstance(e, Transition) and e.phase == "REVOKED"]
        assert line.cause.startswith(cause)


def test_evidence_counts_once_and_one_that_is_not_fatal_is_only_written_down() -> None:
    host = Host().run()
    noted = host.feed(EvidenceGiven("a", 2, "thermal.slowdown", fatal=False))
    assert [(line.phase, line.rank, line.cause) for line in of_type(noted, Transition)] == [
        ("EVIDENCE", 2, "thermal.slowdown")
    ]
    assert not of_type(noted, Fence)
    assert of_type(host.feed(EVIDENCE), Fence)
    host.feed(EXIT)
    assert host.feed(EVIDENCE) == [], "the next life is well"
