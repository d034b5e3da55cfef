"""Views of an instance without a supervisor: its ranks commit them among themselves, in their rendezvous directory.

``view.<epoch>`` is written once and never changed: the rank that links it first has committed that epoch, and the others find
it there. So survivors that noticed different things at different times still go through the same views, and one that dies
half-way leaves either nothing or a whole view behind. Not for instances with a supervisor: there the store decides.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

from eep.errors import EepError
from eep.view import View

_NAME = re.compile(r"view\.(\d+)")
_LARGEST = 1 << 16


class ViewLog:
    def __init__(self, directory: Path) -> None:
        """``directory`` is private to this user (:class:`eep.Rendezvous` sees to it)."""
        self._directory = directory

    def commit(self, view: View) -> View:
        """Commits ``view`` for its epoch, unless that epoch has one already; returns the one it has."""
        descriptor, unnamed = tempfile.mkstemp(prefix=".view-", dir=self._directory)
        try:
            text = json.dumps({"active": view.active, "incarnations": view.incarnations})
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            os.link(unnamed, self._directory / f"view.{view.epoch}")
        except FileExistsError:
            return self._read(view.epoch)
        finally:
            os.unlink(unnamed)
        return view

    def latest(self) -> View | None:
        """The newest view that was committed."""
        epochs = [int(found[1]) for name in os.listdir(self._directory) if (found := _NAME.fullmatch(name))]
        return self._read(max(epochs)) if epochs else None

    def clear(self) -> None:
        """Forgets all views, when the last rank leaves."""
        for name in os.listdir(self._directory):
            if _NAME.fullmatch(name):
                (self._directory / name).unlink(missing_ok=True)

    def _read(self, epoch: int) -> View:
        path = self._directory / f"view.{epoch}"
        if path.stat().st_size > _LARGEST:
            raise EepError(f"{path} is too large to be a view; remove the rendezvous directory and start again")
        try:
            record = json.loads(path.read_text())
            return View(epoch, tuple(map(int, record["active"])), tuple(map(int, record["incarnations"])))
        except (ValueError, KeyError, TypeError) as error:
            raise EepError(
                f"{path} is not a view ({error}); remove the rendezvous directory and start again"
            ) from error
