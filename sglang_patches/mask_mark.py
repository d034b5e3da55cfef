"""The mark of a request that was computed while experts were masked, on its way from its rank to the client.

A rank puts it among the fields that SGLang lets a model add to an output (``customized_info``), and the front end takes it
out again: clients find it in ``meta_info``.
"""

from __future__ import annotations

from typing import Any

MARK = "eep_masked"


class Marks:
    """In place of the list that SGLang expects, which has an entry for each token of the answer."""

    def __getitem__(self, part: slice) -> list[bool]:
        """At least one: an output may have no token."""
        return [True] * max(1, (part.stop or 0) - (part.start or 0))


def is_marked(request: Any) -> bool:
    """Whether a request of a scheduler bears the mark."""
    return MARK in (getattr(request, "customized_info", None) or ())


def mark(request: Any) -> None:
    request.customized_info = {**(getattr(request, "customized_info", None) or {}), MARK: Marks()}


def take_marks(output: Any) -> list[int]:
    """The rows of an output that bear the mark. The output has none afterwards."""
    added = getattr(output, "customized_info", None)
    if added is not None and not isinstance(added, dict):
        from sglang.srt.managers.io_struct import unwrap_from_pickle

        added = unwrap_from_pickle(added)
    if not isinstance(added, dict) or MARK not in added:
        return []
    rows = [row for row, marks in enumerate(added[MARK]) if True in (marks or ())]
    output.customized_info = {name: values for name, values in added.items() if name != MARK} or None
    return rows
