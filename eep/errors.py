"""The exceptions of EEP. Each message says what happened, to which rank, and what to do about it.

Bad arguments raise ``ValueError`` or ``TypeError``, as everywhere in Python, and change nothing.
"""

from __future__ import annotations


class EepError(RuntimeError):
    """The base of every error that EEP itself raises."""


class StepFailed(EepError):
    """The results of this step cannot be trusted: a peer was lost, or sent wrong data, while it ran. Run the step again."""

    def __init__(self, message: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
        """The ranks of the instance that are known to be the cause: they died, gave no answer or sent wrong data. None where
        another rank ended the epoch and its reason is not known here."""


class EpochRevoked(StepFailed):
    """The epoch ended while the step ran. Apply the next view, then run the step again."""


class RankRemoved(EepError):
    """This process is no longer part of the instance. End it; the rank may join again as a new incarnation."""


class RankInUse(EepError):
    """Another live process already has the rank that this one claims."""


class PeerUnreachable(EepError):
    """A peer did not answer in time, or its answer was not valid."""

    def __init__(self, message: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
        """The ranks of the instance that are known to be the cause."""
