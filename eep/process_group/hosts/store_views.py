"""Views of an instance on several hosts, which its ranks commit among themselves in torch's store.

As :mod:`eep.process_group.view_log`, which does it in a directory: an epoch has the view that was stored for it first.
"""

from __future__ import annotations

import msgspec

from eep.abi.peer_table import MAX_RANKS
from eep.errors import EepError
from eep.process_group.hosts.sealed_store import SealedStore
from eep.view import View

_HINT = "views/hint"
"""Of an epoch that has a view, where to look for the newest from. It may be an old one."""


class _StoredView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    active: tuple[int, ...]
    incarnations: tuple[int, ...]


class StoreViews:
    def __init__(self, store: SealedStore) -> None:
        self._store = store
        self._newest: View | None = None

    def commit(self, view: View) -> View:
        """Commits ``view`` for its epoch, unless that epoch has one already; returns the one it has."""
        record = msgspec.json.encode(_StoredView(view.active, view.incarnations))
        committed = self._read(view.epoch, self._store.put_first(_name(view.epoch), record))
        self._store.put(_HINT, str(view.epoch).encode())
        return committed

    def latest(self) -> View | None:
        """The newest view that was committed. Epochs have no gaps."""
        if self._newest is None and (hint := self._store.get(_HINT)) is not None:
            self._newest = self._at(int(hint))
        epoch = 0 if self._newest is None else self._newest.epoch
        while (following := self._at(epoch + 1)) is not None:
            self._newest, epoch = following, epoch + 1
        return self._newest

    def clear(self) -> None:
        """The store goes with the job: what is in it is left there."""

    def _at(self, epoch: int) -> View | None:
        record = self._store.get(_name(epoch))
        return None if record is None else self._read(epoch, record)

    def _read(self, epoch: int, record: bytes) -> View:
        try:
            found = msgspec.json.decode(record, type=_StoredView)
        except msgspec.DecodeError as error:
            raise EepError(f"what torch's store has as the view of epoch {epoch} is none: {error}") from error
        if len(found.incarnations) > MAX_RANKS or not set(found.active) <= set(range(len(found.incarnations))):
            raise EepError(f"what torch's store has as the view of epoch {epoch} does not agree with itself")
        return View(epoch, found.active, found.incarnations)


def _name(epoch: int) -> str:
    return f"views/{epoch}"
