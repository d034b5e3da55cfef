"""One host for tests of the pure core, with a store of its own that answers at once."""

from __future__ import annotations

from eep.membership import (
    EVERY_HOST,
    Effect,
    Event,
    HostState,
    InstanceRecord,
    LeaseHeld,
    Phase,
    Policy,
    Propose,
    Proposed,
    Ready,
    ReportsListed,
    Settled,
    initial_state,
    step,
)


class Host:
    """One host with a store of its own that answers at once."""

    def __init__(self, ranks: tuple[int, ...] = (0, 1, 2, 3), **policy: float) -> None:
        self.state: HostState = initial_state("a#1", ranks, Policy(max_ranks=4, **policy))  # type: ignore[arg-type]
        self.seen: list[Effect] = []
        self.version = 0
        self.feed(LeaseHeld(), ReportsListed({}, EVERY_HOST, 1))

    def feed(self, *events: Event) -> list[Effect]:
        """The effects of ``events`` and of the commits that followed from them."""
        first = len(self.seen)
        for event in events:
            self.state, effects = step(self.state, event)
            self.seen.extend(effects)
            for effect in effects:
                if isinstance(effect, Propose):
                    assert effect.expected == self.version
                    self.version += 1
                    self.feed(Proposed(effect.instance.serial, True, effect.instance, self.version))
        return self.seen[first:]

    @property
    def instance(self) -> InstanceRecord:
        assert self.state.instance is not None
        return self.state.instance

    def run(self) -> Host:
        """Bring every rank in."""
        for rank, local in self.state.ranks.items():
            self.feed(Ready(rank, local.incarnation))
        return self.settle()

    def settle(self) -> Host:
        for rank in self.instance.view.active:
            self.feed(Settled(rank, self.state.ranks[rank].incarnation, self.state.epoch))
        assert self.instance.phase is Phase.RUN
        return self


def of_type(effects: list[Effect], kind: type) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]
