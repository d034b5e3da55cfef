"""Whether the members of an instance have let a rank in, from the views that the ranks show. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from eep.view import View


def inviting_view(rank: int, incarnation: int, views: Mapping[int, View], last_epoch: int) -> View | None:
    """The view after ``last_epoch`` in which all its members have let in that incarnation of ``rank``; None if there is none
    yet. ``views`` are those of the other ranks that answer.

    Ranks that join at the same time are still alone: they let no rank in, and keep none out.
    """
    settled = {other: view for other, view in views.items() if set(view.active) - {other}}
    for view in settled.values():
        if rank not in view.active or view.incarnations[rank] != incarnation or view.epoch <= last_epoch:
            continue
        members = set(view.active) - {rank}
        if members <= views.keys() and all(settled.get(member, view) == view for member in members):
            return view
    return None
