"""What a session asks of the caller that makes it: to repair the experts of a view, and to run a step without tokens."""

from __future__ import annotations

from typing import Protocol

from eep.data_plane.passage import Passage
from eep.view import View


class Repair(Protocol):
    """Makes every expert available in a view. The session calls it once for each view, before any step runs in it."""

    def __call__(self, view: View, /) -> int | None:
        """The digest of the placement, on which all ranks of the view must agree.

        None: the ranks of this view cannot hold all experts, as each of them sees. Nothing runs until others join.
        0: this rank alone could not do its part. It tells the others, and all wait for the next view.
        """


class RunEmpty(Protocol):
    """Runs a step without tokens. A rank takes part in this way while another repeats a step of its own."""

    def __call__(self, passage: Passage, /) -> object:
        """``passage``: that of the step. It may have portions, and each of them is empty here."""
