"""Which ranks are in: the pure core of membership. No clock, no I/O, no randomness.

The contract:

* There is one record of the instance, :class:`InstanceRecord`, and it changes only by compare-and-swap in a
  store. A host that cannot reach the store's majority cannot change it. Each change of the ranks that are in
  has a new, higher epoch.
* Each host publishes one :class:`Report` of what it *sees*. Reports are evidence; only the record is
  membership.
* One host at a time, the *coordinator*, turns reports into the next record with :func:`decide`. Any host
  takes over when the coordinator's report ends. If two try, the compare-and-swap lets one win.
* Each host runs :func:`step` over what happens to it and does what the effects say: revoke, propose,
  publish, fence, launch, notify, tell that a rank is gone, set a timer.

Both functions look at *levels* (what is so) rather than edges (what happened), which is why duplicate,
late, reordered and stale events are harmless: seeing a thing twice is seeing it.
"""

from eep.membership.coordination import waiting_for
from eep.membership.decide import Unchanged, decide, judge, next_incarnation
from eep.membership.effects import (
    Effect,
    Fence,
    Launch,
    ListReports,
    LossCause,
    Notify,
    PhaseChanged,
    Propose,
    Publish,
    RankGone,
    Reject,
    Revoke,
    SetTimer,
    Transition,
)
from eep.membership.events import (
    EVERY_HOST,
    Action,
    Deadline,
    Event,
    EvidenceGiven,
    Exited,
    Failed,
    InstanceSeen,
    LeaseHeld,
    LeaseLost,
    Leave,
    LinksSeen,
    NewsHeard,
    OperatorAsked,
    Proposed,
    PulseStopped,
    Ready,
    ReportSeen,
    ReportsListed,
    RevokeSeen,
    Settled,
    Stalled,
    StallKind,
    StopAsked,
    Suspected,
    Timer,
)
from eep.membership.host_silence import HostSilence, ReadReport, after_silence, must_write, relied_on_until
from eep.membership.news import News
from eep.membership.records import Accusation, InstanceRecord, Life, Phase, RankReport, Report, host_of
from eep.membership.standstill import Standstill, after_look, has_stalled, must_advance
from eep.membership.state import (
    HostState,
    LocalRank,
    Policy,
    RankStatus,
    initial_state,
    missing_links,
    news_of,
    phase_name,
    report_of,
    wanted_scope,
    why_it_must_stay,
)
from eep.membership.step import step

__all__ = [
    "EVERY_HOST",
    "Accusation",
    "Action",
    "Deadline",
    "Effect",
    "Event",
    "EvidenceGiven",
    "Exited",
    "Failed",
    "Fence",
    "HostSilence",
    "HostState",
    "InstanceRecord",
    "InstanceSeen",
    "Launch",
    "LeaseHeld",
    "LeaseLost",
    "Leave",
    "Life",
    "LinksSeen",
    "ListReports",
    "LocalRank",
    "LossCause",
    "News",
    "NewsHeard",
    "Notify",
    "OperatorAsked",
    "Phase",
    "PhaseChanged",
    "Policy",
    "Propose",
    "Proposed",
    "Publish",
    "PulseStopped",
    "RankGone",
    "RankReport",
    "RankStatus",
    "ReadReport",
    "Ready",
    "Reject",
    "Report",
    "ReportSeen",
    "ReportsListed",
    "Revoke",
    "RevokeSeen",
    "SetTimer",
    "Settled",
    "StallKind",
    "Stalled",
    "Standstill",
    "StopAsked",
    "Suspected",
    "Timer",
    "Transition",
    "Unchanged",
    "after_look",
    "after_silence",
    "decide",
    "has_stalled",
    "host_of",
    "initial_state",
    "judge",
    "missing_links",
    "must_advance",
    "must_write",
    "news_of",
    "next_incarnation",
    "phase_name",
    "relied_on_until",
    "report_of",
    "step",
    "waiting_for",
    "wanted_scope",
    "why_it_must_stay",
]
