"""Where the ranks of one instance on one host find each other: a private directory.

A rank *claims* its number by locking a file ``r<rank>.i<incarnation>.lock``. The kernel drops the lock when the last
process holding it is gone, so that a lock says exactly what a rank must know: whether a process could still write with the
mappings of that incarnation. Beside it lies ``r<rank>.i<incarnation>.sock``, where peers ask for the rank's memory.

An incarnation number is never used twice. The inboxes of incarnations i and i+2 of a rank are the same memory, so i+2
is refused while i could still be alive; i+1 is not, because its writes land elsewhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator

from eep.abi.peer_table import INCARNATIONS, MAX_RANKS
from eep.access import TEMPORARY_PREFIX, check_socket_path, make_private, make_temporary, temporary_base
from eep.errors import RankInUse

_CLAIM = re.compile(r"r(\d+)\.i(\d+)\.lock")
_MOST_REMOVALS = 100
"""Of the directory while one process wants its lock; more is no last rank that leaves, but an error."""


class Claim:
    """This process is ``incarnation`` of ``rank`` for as long as the claim is open."""

    def __init__(self, directory: pathlib.Path, rank: int, incarnation: int, fd: int) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.socket_path = socket_path(directory, rank, incarnation)
        self._fd = fd

    def close(self) -> None:
        """Gives the rank up. The lock file stays, as a record that this incarnation was used."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # it is gone, or the disk is read-only
                os.unlink(self.socket_path)
            os.close(self._fd)
            self._fd = -1


class NoClaim:
    """In place of a claim, until a process becomes a rank that another one still is."""

    incarnation = 0
    """Of a rank that is alone nothing depends on it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def close(self) -> None:
        pass


def socket_path(directory: pathlib.Path, rank: int, incarnation: int) -> str:
    return check_socket_path(str(directory / f"r{rank}.i{incarnation}.sock"))


class Rendezvous:
    """A directory that only this user can enter. ``Rendezvous(path)`` makes it if it is not there yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path).absolute()
        socket_path(self.path, MAX_RANKS, 10**6)  # fail now rather than at the first claim
        make_private(self.path)
        self._owner_lock = -1

    @classmethod
    def temporary(cls) -> Rendezvous:
        """A fresh directory, removed by :meth:`close`; those whose makers were killed are swept first."""
        _sweep()
        rendezvous = cls(make_temporary())
        rendezvous._owner_lock = _create_locked(rendezvous.path / "owner.lock")
        return rendezvous

    def claim(self, rank: int, incarnation: int | None = None) -> Claim:
        """Becomes ``rank``: as the next incarnation, or as the one that the control plane has chosen."""
        if not 0 <= rank < MAX_RANKS:
            raise ValueError(f"rank {rank} is outside 0..{MAX_RANKS - 1}")
        with self._mutex():
            earlier = {number: self._is_held(rank, number) for number in self._incarnations(rank)}
            latest = max(earlier, default=-1)
            living = [number for number, held in earlier.items() if held]
            if incarnation is None:
                incarnation = latest + 1
                if living:
                    raise RankInUse(
                        f"rank {rank} is alive (incarnation {living[-1]}, process {self._holder(rank, living[-1])}); "
                        "end that process first, or pass the incarnation that replaces it"
                    )
            elif incarnation <= latest:
                raise RankInUse(
                    f"incarnation {incarnation} of rank {rank} is stale: {latest} was used already, so the next is "
                    f"{latest + 1}"
                )
            for number in living:
                if number <= incarnation - INCARNATIONS:
                    raise RankInUse(
                        f"incarnation {number} of rank {rank} (process {self._holder(rank, number)}) could still write "
                        f"to the inbox of incarnation {incarnation}; end it first"
                    )
            fd = _create_locked(self._lock_path(rank, incarnation))
            with contextlib.suppress(OSError):  # on a full disk: the number is only for the text of an error
                os.pwrite(fd, str(os.getpid()).encode(), 0)
            self._forget(rank, [number for number in earlier if number not in living])
        return Claim(self.path, rank, incarnation, fd)

    def latest(self, rank: int) -> int | None:
        """The newest incarnation of ``rank`` that is alive, if any."""
        numbers = sorted(self._incarnations(rank), reverse=True)
        return next((number for number in numbers if self._is_held(rank, number)), None)

    def was_lost(self, rank: int) -> bool:
        """Whether a process had ``rank`` and none has it now."""
        return bool(self._incarnations(rank)) and self.latest(rank) is None

    def claimed_ranks(self) -> dict[int, int]:
        """Every living rank with its newest incarnation."""
        ranks = sorted({int(match[1]) for match in self._claims()})
        return {rank: number for rank in ranks if (number := self.latest(rank)) is not None}

    @contextlib.contextmanager
    def deserted(self) -> Iterator[bool]:
        """Whether no rank is there, and meanwhile none comes: what the last one leaves behind can be removed."""
        with self._mutex():
            yield not self.claimed_ranks()

    def close(self) -> None:
        """Removes the directory if this object made it."""
        if self._owner_lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._owner_lock)
            self._owner_lock = -1

    def remove(self) -> None:
        """Removes the directory, whichever rank made it. For the last rank of an instance that made it for itself."""
        shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock_path(self, rank: int, incarnation: int) -> pathlib.Path:
        return self.path / f"r{rank}.i{incarnation}.lock"

    def _claims(self) -> Iterator[re.Match[str]]:
        return filter(None, map(_CLAIM.fullmatch, os.listdir(self.path)))

    def _incarnations(self, rank: int) -> list[int]:
        return [int(match[2]) for match in self._claims() if int(match[1]) == rank]

    def _is_held(self, rank: int, incarnation: int) -> bool:
        return _is_held(self._lock_path(rank, incarnation))

    def _holder(self, rank: int, incarnation: int) -> str:
        return self._lock_path(rank, incarnation).read_text() or "unknown"

    def _forget(self, rank: int, incarnations: list[int]) -> None:
        for number in incarnations:
            self._lock_path(rank, number).unlink(missing_ok=True)
            pathlib.Path(socket_path(self.path, rank, number)).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _mutex(self) -> Iterator[None]:
        # Held shortly, by those who claim and by the last who leaves; who is killed drops it.
        while True:
            fd = self._open_lock()
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:  # else it was removed while this process waited for it
                    yield
                    return
            finally:
                os.close(fd)

    def _open_lock(self) -> int:
        # The last rank may remove the directory at any moment, and the lock with it: then both are made again.
        removals = 0
        while True:
            try:
                make_private(self.path)
                return os.open(self.path / "claims.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                removals += 1
                if removals == _MOST_REMOVALS:
                    raise


def _create_locked(path: pathlib.Path) -> int:
    # Locked before it gets its name: a process that sees the file sees it held.
    fd, unnamed = tempfile.mkstemp(dir=path.parent, prefix=".")
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(unnamed, path)
    return fd


def _is_held(path: pathlib.Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a lock needs no more, and the disk may be read-only
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two who look at the same time do not take each other for the owner.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _sweep() -> None:
    for owner in temporary_base().glob(f"{TEMPORARY_PREFIX}*/owner.lock"):
        with contextlib.suppress(OSError):  # another rank's
            # The maker may be gone while ranks of its instance live on.
            if not any(map(_is_held, owner.parent.rglob("*.lock"))):
                shutil.rmtree(owner.parent, ignore_errors=True)
