"""The store of ``torch.distributed`` as ranks of several hosts use it: every record is sealed with the key of the job, and
every wait has an end.

Torch's store has no seal, and a client of it may wait for minutes, or for ever, for a host that is cut off. So one thread
asks, and the caller waits for it no longer than it likes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from eep.control.store.record_seal import RecordSeal
from eep.errors import EepError, PeerUnreachable

_ANSWERS_WITHIN_S = 5.0
_LARGEST = 1 << 16
_PREFIX = "eep/hosts/"
T = TypeVar("T")


class SealedStore:
    """Names and records. :class:`eep.PeerUnreachable` where the store does not answer."""

    def __init__(self, store: Any, key: bytes, answers_within: float = _ANSWERS_WITHIN_S) -> None:
        self._store, self._seal, self._patience = store, RecordSeal(key), answers_within
        self._questions: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        """Held while a question is put: no thread answers one that is put behind the end."""
        self._closed = False
        threading.Thread(target=self._serve, name="eep-store", daemon=True).start()

    def put(self, name: str, record: bytes) -> None:
        sealed = self._sealed(name, record)
        self._ask(lambda: self._store.set(_PREFIX + name, sealed))

    def put_first(self, name: str, record: bytes) -> bytes:
        """Stores ``record`` unless there is one; the one that there is."""
        sealed = self._sealed(name, record)
        return self._opened(name, self._ask(lambda: self._store.compare_set(_PREFIX + name, "", sealed)))

    def get(self, name: str) -> bytes | None:
        def look() -> bytes | None:
            return self._store.get(_PREFIX + name) if self._store.check([_PREFIX + name]) else None

        found = self._ask(look)
        return None if found is None else self._opened(name, found)

    def count(self, name: str) -> int:
        """The next number under ``name``, from 0. It is not sealed: a number that was used before is refused elsewhere."""
        return int(self._ask(lambda: self._store.add(_PREFIX + name, 1))) - 1

    def remove(self, name: str) -> None:
        self._ask(lambda: self._store.delete_key(_PREFIX + name))

    # ---- as a registry of links, whose records have seals of their own ----

    def publish(self, key: str, value: bytes) -> None:
        self.put(key, value.hex().encode())

    def withdraw(self, key: str) -> None:
        """The store may be gone by then, and the record with it."""
        try:
            self.remove(key)
        except PeerUnreachable:
            return

    def scan(self, prefix: str) -> dict[str, bytes]:
        """The record of just that name: a store of torch cannot list names."""
        found = self.get(prefix)
        return {} if found is None else {prefix: bytes.fromhex(found.decode())}

    def close(self) -> None:
        """What was asked is still answered. Torch's store stays the caller's, and is let go of."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._questions.put(None)

    def _sealed(self, name: str, record: bytes) -> str:
        return self._seal.seal(name, record).decode()

    def _opened(self, name: str, sealed: bytes) -> bytes:
        record = self._seal.open(name, sealed) if len(sealed) <= _LARGEST else None
        if record is None:
            raise EepError(
                f"the record {name} in torch's store was not made with the key of this job; give all ranks the same"
            )
        return record

    def _ask(self, question: Callable[[], T]) -> T:
        answer: Future[T] = Future()
        with self._closing:
            if self._closed:
                raise PeerUnreachable("torch's store is not asked any more: this rank has left")
            self._questions.put((question, answer))
        try:
            return answer.result(self._patience)
        except TimeoutError as error:
            raise PeerUnreachable(f"torch's store has not answered for {self._patience:g} s") from error
        except RuntimeError as error:
            raise PeerUnreachable(f"torch's store does not answer: {error}") from error

    def _serve(self) -> None:
        while (asked := self._questions.get()) is not None:
            question, answer = asked
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)
