"""What a lost rank has left behind of a request: in its cache, or else in its copy in host memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from eep import faults
from eep.view import View
from sglang_patches.rank import rank_session
from sglang_patches.rank.kv.anchored_pool import LEAST, AnchoredPool
from sglang_patches.rank.kv.lost_copy import CopiedContext
from sglang_patches.rank.kv.lost_pool import AnchoredContext, NoRestore

_KNOWN_WITHIN = 5.0
"""Seconds until this rank knows, too, that the other is gone."""


@dataclass(frozen=True)
class LostLife:
    rank: int
    incarnation: int
    wire: str

    def is_in(self, view: View) -> bool:
        return self.rank in view.active and view.incarnations[self.rank] == self.incarnation


class LostContext:
    """The context of one request. NoRestore if there is none."""

    def __init__(self, pool: AnchoredPool, lost: LostLife, cache: Any) -> None:
        """``cache``: SGLang's. It may have parts beside those in ``pool``, such as states of a recurrent model."""
        if pool.cache is None or pool.cache is not cache:
            raise NoRestore("a cache of this kind is not kept")
        _check_is_gone(lost)
        self._rank, self.origin = lost.rank, _find(pool, lost)

    def tokens(self, most: int, page: int) -> int:
        """How many tokens of it to copy, whole pages and ``most`` at most. NoRestore if that is not worth the while."""
        count = min(self.origin.tokens, most) // page * page
        if count < LEAST:
            raise NoRestore(f"rank {self._rank} has noted {self.origin.tokens} tokens of it")
        faults.at("kv.restore.before")
        return count

    def copy(self, slots: torch.Tensor, first: int = 0) -> None:
        """The entries of the tokens from ``first`` on. NoRestore if they are not the request's."""
        if not len(slots):
            return
        self.origin.copy(slots.long().contiguous(), first)
        faults.at("kv.restore.mid")
        if slots.is_cuda:
            torch.cuda.current_stream(slots.device).synchronize()
        self.origin.check()

    def leave(self) -> None:
        """It is copied, or will not be: the next life of its rank need not keep it."""
        self.origin.leave()


def leave(pool: AnchoredPool, lost: LostLife) -> None:
    """The context of a request is computed, and need not be kept."""
    with suppress(Exception):  # there may be none, which is why it is computed
        AnchoredContext(pool, lost.rank, lost.incarnation, lost.wire).leave()


def _find(pool: AnchoredPool, lost: LostLife) -> AnchoredContext | CopiedContext:
    who = (lost.rank, lost.incarnation, lost.wire)
    try:
        return AnchoredContext(pool, *who)
    except Exception as reason:  # of a driver, too, whose GPU is gone
        if not pool.backup_bytes:
            raise
        try:
            return CopiedContext(pool, *who)
        except NoRestore as other:
            raise NoRestore(f"{reason}; {other}") from reason


def _check_is_gone(lost: LostLife) -> None:
    """A rank that is in may change what it has while it is copied. The front end may know of a loss before this rank does,
    which can run no step before it has the view without the lost one: so there is nothing to miss."""
    session = rank_session.get_session().joined
    if session is None:
        raise NoRestore("this rank is not in yet")
    view: View | None = session.view
    if view is not None and lost.is_in(view):
        session.member.wait_for_view(after=view.epoch, within=_KNOWN_WITHIN)
        view = session.member.newest_view
    if view is None or lost.is_in(view):
        raise NoRestore(f"rank {lost.rank} still has it")
