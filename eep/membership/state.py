"""What one host knows: the last record it saw, the reports it needs, and its own ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from eep.membership.decide import lives
from eep.membership.events import EVERY_HOST
from eep.membership.news import News, NewsByHost, why_revoked
from eep.membership.records import Accusation, InstanceRecord, Life, Phase, RankReport, Report, host_of
from eep.view import NEVER


@dataclass(frozen=True, slots=True)
class Policy:
    """How patient a host is. Delays are in seconds; only the supervisor knows what a second is."""

    max_ranks: int
    first_view: int = 1
    fewest_ranks: int = 0
    """How many suffice to serve; 0: not known. An operator may not take a rank out when fewer would stay."""
    enough_ranks: int = 0
    """How many serve as well as all do, where fewer serve only in part; 0: ``fewest_ranks`` do."""
    judge_after: float = 0.2
    """How long accusations are collected before they are judged."""
    news_deadline: float = 0.5
    """How long news of another host may take to become a record, before this host says that its epoch ended, too."""
    regroup_after: float = 2.0
    """After a loss of all ranks: how long those that are back and are enough wait for the others."""
    make_do_after: float = 60.0
    """The same for those that could serve only in part, from the first of them on."""
    start_deadline: float = 600.0
    settle_deadline: float = 120.0
    stall_deadline: float = 60.0
    """How long a rank that starts, settles or runs may make no progress; 0: for ever."""
    stopped_deadline: float = 0.0
    """How long a rank may be stopped (SIGSTOP), whatever it does; 0: until its peers or the other deadlines notice."""
    hung_deadline: float = 0.0
    """How long a rank that runs may sleep, or compute, without a reason; 0: until its peers or the other deadlines notice."""
    fence_deadline: float = 10.0
    leave_grace: float = 5.0
    relaunch_backoff: float = 0.5
    """The first relaunch is immediate; each one after it waits twice as long as the one before."""
    longest_backoff: float = 30.0
    relaunch_limit: int = 5
    """How many times in a row a rank may fail before it is given up."""
    stable_after: float = 60.0
    """How long a rank must serve before its failures are forgotten."""


class RankStatus(Enum):
    """Where one local rank stands. What the others need to know of it is its :class:`Life`."""

    WANTED = "wanted"
    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"
    FENCING = "fencing"
    RESTING = "resting"
    """Dead, and waiting to be relaunched."""
    DOWN = "down"
    ENDING = "ending"
    """It runs no more, but the kernel has not taken it apart yet. It is out; what takes its place waits for the exit."""
    STUCK = "stuck"
    """Killed, but it does not end. It is out, and nothing takes its place until it has ended."""


_LIFE = {
    RankStatus.WANTED: Life.WANTED,
    RankStatus.STARTING: Life.STARTING,
    RankStatus.READY: Life.READY,
    RankStatus.LEAVING: Life.LEAVING,
    RankStatus.FENCING: Life.FENCING,
    RankStatus.RESTING: Life.RESTING,
    RankStatus.DOWN: Life.DOWN,
    RankStatus.ENDING: Life.RESTING,
    RankStatus.STUCK: Life.DOWN,
}


@dataclass(frozen=True, slots=True)
class LocalRank:
    """One local rank. ``keep`` says whether it is to be relaunched after it ends."""

    status: RankStatus = RankStatus.WANTED
    incarnation: int = NEVER
    settled: int = -1
    failures: int = 0
    keep: bool = True
    blameless: bool = False
    """It is being fenced for no fault of its own, so its end does not count against it."""

    @property
    def has_process(self) -> bool:
        return self.runs or self.status in (RankStatus.FENCING, RankStatus.ENDING, RankStatus.STUCK)

    @property
    def runs(self) -> bool:
        """Whether it is alive and nothing has been done to end it."""
        return self.status in (RankStatus.STARTING, RankStatus.READY, RankStatus.LEAVING)


@dataclass(frozen=True, slots=True)
class HostState:
    """Everything :func:`eep.membership.step` needs to remember."""

    ident: str
    policy: Policy
    ranks: Mapping[int, LocalRank]
    instance: InstanceRecord | None = None
    version: int = 0
    reports: Mapping[str, Report] = field(default_factory=dict)
    scope: str = ""
    """Whose reports ``reports`` holds: one host's, or those of ``EVERY_HOST``. Empty: none can be relied on."""
    listed: int = 0
    seen: Mapping[str, int] = field(default_factory=dict)
    """Store versions of the listing and of each report since, by which late and repeated ones are told."""
    news: NewsByHost = field(default_factory=dict)
    """What other supervisors said directly, which their reports may not say yet."""
    unlinked: tuple[str, ...] = ()
    """The other supervisors to which there is no link."""
    looking: bool = False
    """The reports are being listed again."""
    leased: bool = False
    in_flight: int = 0
    """The serial of the proposal that is on its way; the next one waits for its answer."""
    forgotten: bool = False
    """The store has lost records that were committed. Nothing is proposed until it has them again."""
    settled: int = -1
    revoked: int = -1
    told_revoked: int = -1
    """What of that the others are told. An epoch that another host ended is its to tell, for a while."""
    accusations: tuple[Accusation, ...] = ()
    judging: int = -1
    judged: int = -1
    regrouping: int = -1
    regrouped: int = -1
    making_do: int = -1
    made_do: int = -1
    """The empty epochs in which each wait for further ranks began, and was over."""
    published: Report | None = None
    stopping: bool = False
    operations: tuple[str, ...] = ()

    @property
    def host(self) -> str:
        return host_of(self.ident)

    @property
    def epoch(self) -> int:
        return self.instance.view.epoch if self.instance else -1

    def is_in(self, rank: int) -> bool:
        """Whether the process of this local rank is part of the committed view."""
        return self.instance is not None and self.instance.has(rank, self.ranks[rank].incarnation)


def initial_state(ident: str, ranks: tuple[int, ...], policy: Policy) -> HostState:
    """A host that has just started and wants ``ranks`` to run."""
    if not host_of(ident) or "/" in ident or "#" not in ident:
        raise ValueError(f"a supervisor is called host#nonce, with no slash, got {ident!r}")
    bad = [rank for rank in ranks if not 0 <= rank < policy.max_ranks]
    if bad or len(set(ranks)) != len(ranks):
        raise ValueError(f"ranks must be distinct and below max_ranks={policy.max_ranks}, got {ranks}")
    return HostState(ident, policy, {rank: LocalRank() for rank in ranks})


def report_of(state: HostState) -> Report:
    """What this host has to tell the others. A host registers with this, never with less: a report that
    leaves a rank out says that the rank is dead."""
    ranks = {rank: RankReport(_told_life(state, rank), local.incarnation) for rank, local in state.ranks.items()}
    return Report(state.ident, ranks, state.settled, state.told_revoked, state.accusations)


def _told_life(state: HostState, rank: int) -> Life:
    status = state.ranks[rank].status
    waits = status is RankStatus.READY and not state.is_in(rank) and bool(missing_links(state))
    return Life.STARTING if waits else _LIFE[status]


def missing_links(state: HostState) -> tuple[str, ...]:
    """The supervisors without a link that the ranks of this host need before they may join: they exchange tokens with the
    ranks of those. Where no rank is in, those of the coordinator begin."""
    instance = state.instance
    if instance is None or not state.unlinked:
        return ()
    needed = {instance.owners[rank] for rank in instance.view.active} or {instance.coordinator}
    return tuple(ident for ident in state.unlinked if ident in needed)


def news_of(state: HostState) -> News:
    """What this host has to tell the others at once: what no rank can wait for any more. That an epoch is revoked is told by
    the host that saw why, and not again by all that heard it."""
    dead = {
        rank: local.incarnation
        for rank, local in state.ranks.items()
        if state.is_in(rank) and not _LIFE[local.status].alive
    }
    if (
        state.instance is None
        or state.told_revoked < state.epoch
        or why_revoked(state.instance, state.news) is not None
    ):
        return News(state.ident, dead)
    return News(state.ident, dead, state.told_revoked)


def why_it_must_stay(state: HostState, rank: int) -> str | None:
    """Why an operator may not take this rank out now; None if that is no harm. A rank that is in is needed where too few
    others are in; one that is to come back, where too few others are in or come back."""
    if state.instance is None:
        return None
    local, fewest = state.ranks.get(rank), state.policy.fewest_ranks
    active = set(state.instance.view.active)
    leaving = {each for each, other in state.ranks.items() if other.status is RankStatus.LEAVING}
    if rank in active:
        stay, how = active - leaving - {rank}, "would stay"
    elif local is not None and local.keep and local.status is not RankStatus.LEAVING:
        # What ranks of other hosts do is not known here, so those count that have ever had a host.
        elsewhere = {each for each, owner in enumerate(state.instance.owners) if owner and each not in state.ranks}
        kept = {each for each, other in state.ranks.items() if other.keep}
        stay, how = (active | elsewhere | kept) - leaving - {rank}, "would serve or come back"
    else:
        return None  # it is out for good already
    if len(stay) >= fewest:
        return None
    return f"rank {rank} cannot be taken out: {len(stay)} {how}, and {fewest} are needed; launch another first"


def is_known(state: HostState, ident: str) -> bool:
    """Whether the record names this supervisor, and it is another than this one."""
    return state.instance is not None and ident != state.ident and ident in state.instance.owners


def is_coordinator(state: HostState) -> bool:
    return state.instance is not None and state.instance.coordinator == state.ident


def wanted_scope(state: HostState) -> str:
    """Whose reports to watch. A coordinator watches every host; the others watch only the coordinator, so
    that a view change costs each of them the same however many there are."""
    if state.instance is None or is_coordinator(state):
        return EVERY_HOST
    return host_of(state.instance.coordinator)


def coordinator_missing(state: HostState) -> bool:
    """Whether the coordinator's report is known to have ended, so that another host must take over."""
    return (
        state.instance is not None
        and not is_coordinator(state)
        and state.scope in (EVERY_HOST, host_of(state.instance.coordinator))
        and not lives(state.instance.coordinator, state.reports)
    )


def must_look_again(state: HostState) -> bool:
    """Whether a host seems gone that may only be missing because the known reports are older than the record.

    The owner of each rank that is in, and the coordinator, had a report when the record was written. A missing
    report proves the end of a lease only if what this host knows is at least as new as the record.
    """
    instance = state.instance
    if instance is None or not state.scope:
        return False
    if is_coordinator(state):
        needed = {instance.owners[rank] for rank in instance.view.active} - {state.ident}
    else:
        needed = {instance.coordinator}
    return any(
        max(state.listed, state.seen.get(host_of(ident), 0)) < state.version
        for ident in needed
        if not lives(ident, state.reports)
    )


def phase_name(state: HostState) -> str:
    """The phase as this host sees it: FORMING, REVOKED, AGREED, REPAIRED or RUN."""
    if state.instance is None or not state.instance.view.active:
        return "FORMING"
    if state.revoked >= state.epoch:
        return "REVOKED"
    if state.instance.phase is Phase.RUN:
        return "RUN"
    return "REPAIRED" if state.settled == state.epoch else "AGREED"
