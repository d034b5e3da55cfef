"""The exceptions of EEP. Each message says what is wrong and what to do about it.

Bad arguments raise ``ValueError`` or ``TypeError`` as everywhere in Python, and change nothing.
"""

from __future__ import annotations


class EepError(RuntimeError):
    """Anything that EEP itself finds wrong."""


class StepFailed(EepError):
    """What this step computed is not to be trusted: a peer was lost, or lied, while it ran. Run it again."""


class EpochRevoked(StepFailed):
    """The epoch ended while the step ran. Apply the next view, then run the step again."""


class RankRemoved(EepError):
    """This process is no longer part of the instance. It may come back only as a new incarnation."""


class RankInUse(EepError):
    """A live process already is the rank that this one claims to be."""


class PeerUnreachable(EepError):
    """A peer did not answer in time, or what it answered cannot be."""
