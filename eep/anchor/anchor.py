"""A rank's side of memory that outlives it.

    anchor = Anchor(directory, rank, incarnation)
    memory, life = anchor.attach("kv", size, SharedMemory)   # that of life ``life``, or new memory if there is none

The keeper holds the descriptors (:mod:`eep.anchor.memory_holder`). If the keeper is killed, its successor holds nothing, and
the anchor has it hold everything again. Without a keeper memory is as mortal as its process, and the log says so.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from eep.anchor.memory_holder import MAX_PACKET
from eep.data_plane.memory.parted import NONE, PartedKind, PartedMemory
from eep.errors import EepError, PeerUnreachable

if TYPE_CHECKING:  # what asks for a list needs no torch
    from eep.data_plane.memory import Memory, MemoryKind, PlainKind

logger = logging.getLogger(__name__)
SOCKET = "anchor.sock"
ANSWERS_WITHIN = 2.0
_PAUSE_S = 0.2


class AnchorGone(EepError):
    """No process holds memory there."""


@dataclass(frozen=True, slots=True)
class HeldMemory:
    rank: int
    name: str
    incarnation: int
    size: int


def list_held(directory: Path) -> list[HeldMemory]:
    """Everything that the keeper of a server holds. AnchorGone if there is none."""
    answer, _ = _ask(directory, {"do": "list"})
    return [HeldMemory(**each) for each in answer["held"]]


def let_go(directory: Path, rank: int, incarnation: int) -> None:
    """Of all that a rank had in this life and in earlier ones. Nothing happens if no process holds memory there."""
    with suppress(AnchorGone):
        _ask(directory, {"do": "drop", "rank": rank, "incarnation": incarnation})


def drop(directory: Path, rank: int, incarnation: int, name: str) -> None:
    """Of what a rank had under a name in this life and in earlier ones. AnchorGone if no process holds memory there."""
    _ask(directory, {"do": "drop", "rank": rank, "incarnation": incarnation, "name": name})


class Anchor:
    """Of a process that does not know yet which life of its rank it is, the anchor holds nothing until :meth:`begin`: what
    there is belongs to another process, and this one may only look."""

    def __init__(self, directory: Path, rank: int, incarnation: int | None = None) -> None:
        self.directory, self.rank, self._incarnation = directory, rank, incarnation
        self._held: dict[str, Memory] = {}
        self._closed = threading.Event()
        self._watched: socket.socket | None = None
        self._watch = threading.Thread(target=self._hold_for_ever, name="eep-anchor", daemon=True)
        self._watch.start()

    def begin(self, incarnation: int) -> None:
        """From now on all that this process has attached outlives it."""
        self._incarnation = incarnation
        for name, memory in list(self._held.items()):
            self.hold(name, memory)

    def attach(self, name: str, size: int, kind: MemoryKind, place: Memory | None = None) -> tuple[Memory, int | None]:
        """The memory that the last life of this rank had under ``name``, and that life; or new memory, and None. From now
        on it outlives this process. ``place``: a placeholder that is to become this memory.

        EepError if there is none and this process does not know its life."""
        memory, life = self.inherit(name, size, kind)
        if memory is None:
            if self._incarnation is None:
                raise EepError(f"rank {self.rank} has no memory {name} of {size} bytes from which a spare could start")
            if isinstance(kind, PartedKind):
                self._let_go_of_parts(name)
            memory = kind.create(f"eep-{name}", size)
        if place is not None:
            place.become(memory)
            memory = place
        self.hold(name, memory)
        return memory, life

    def hold(self, name: str, memory: Memory) -> None:
        """From now on this memory outlives the process, in place of what there was under ``name``."""
        self._held[name] = memory
        if self._incarnation is None:
            return
        try:
            self._hold(name, memory)
        except EepError as error:
            logger.warning("%s ends with this process: %s", name, error)

    def inherit(self, name: str, size: int, kind: MemoryKind) -> tuple[Memory | None, int | None]:
        """What the last life had, and that life; None if it had nothing of this size."""
        try:
            return self.look_at(self.rank, name, size, kind) or (None, None)
        except PeerUnreachable as error:
            logger.warning("what is held as %s cannot be used, and new memory is: %s", name, error)
            return None, None

    def look_at(self, rank: int, name: str, size: int, kind: MemoryKind) -> tuple[Memory, int] | None:
        """What is held for a rank under a name, mapped here, and the life that had it; None if there is nothing of this size.
        PeerUnreachable if it cannot be mapped."""
        if isinstance(kind, PartedKind):
            return self._look_at_parts(rank, name, size, kind)
        found = self._find_of_size(rank, name, size)
        return None if found is None else (cast("PlainKind", kind).adopt(found[1], size), found[0])

    def _look_at_parts(self, rank: int, name: str, size: int, kind: PartedKind) -> tuple[Memory, int] | None:
        descriptors, life = list[int](), 0
        for number, part in enumerate(kind.parts_of(size)):
            if part.is_loose and not kind.backed:
                descriptors.append(NONE)
                continue
            found = self._find_of_size(rank, _name_of_part(name, number), part.size)
            if found is None and not part.is_loose:
                for descriptor in descriptors:
                    if descriptor != NONE:
                        os.close(descriptor)
                return None
            life = max(life, 0 if found is None else found[0])
            descriptors.append(NONE if found is None else found[1])
        return kind.adopt_parts(descriptors, size), life

    def _let_go_of_parts(self, name: str) -> None:
        """There may have been more of them, or of other sizes."""
        with suppress(EepError):  # nothing is held
            for each in list_held(self.directory):
                if each.rank == self.rank and each.name.rpartition(".")[0] == name:
                    drop(self.directory, self.rank, each.incarnation, each.name)

    def _find_of_size(self, rank: int, name: str, size: int) -> tuple[int, int] | None:
        """A life, and a descriptor, which the caller closes."""
        found = self.find(rank, name)
        if found is None:
            return None
        held, descriptor = found
        if held.size != size:
            os.close(descriptor)
            return None
        return held.incarnation, descriptor

    def find(self, rank: int, name: str) -> tuple[HeldMemory, int] | None:
        """What is held for a rank under a name, and a descriptor of it, which the caller closes; None if there is nothing."""
        try:
            answer, descriptor = _ask(self.directory, {"do": "find", "rank": rank, "name": name})
        except EepError:
            return None
        if descriptor is None:
            return None
        return HeldMemory(rank, name, int(answer["incarnation"]), int(answer["size"])), descriptor

    def close(self) -> None:
        """Hold nothing again from here on. What is held stays."""
        self._closed.set()
        with suppress(OSError):  # it is closed already
            if self._watched is not None:
                self._watched.shutdown(socket.SHUT_RDWR)
        self._watch.join(2 * ANSWERS_WITHIN)

    def _hold(self, name: str, memory: Memory) -> None:
        who = {"rank": self.rank, "incarnation": self._incarnation}
        if not isinstance(memory, PartedMemory):
            _ask(self.directory, {"do": "hold", **who, "name": name, "size": memory.size}, memory.fd)
            return
        for number, (part, descriptor) in enumerate(zip(memory.parts, memory.descriptors, strict=True)):
            its = {**who, "name": _name_of_part(name, number)}
            if part.is_loose and not memory.kind.backed:
                continue  # what it holds ends with the process
            if descriptor == NONE:
                _ask(self.directory, {"do": "drop", **its})
            else:
                _ask(self.directory, {"do": "hold", **its, "size": part.size}, descriptor)

    def _hold_for_ever(self) -> None:
        """Whenever the keeper was replaced, have the next one hold what the last one held."""
        while not self._closed.is_set():
            try:
                with _connect(self.directory) as self._watched:
                    for name, memory in list(self._held.items()) if self._incarnation is not None else ():
                        self._hold(name, memory)
                    self._watched.settimeout(None)
                    while not self._closed.is_set() and self._watched.recv(1):
                        pass  # nothing comes unasked but the end
            except (EepError, OSError):
                pass  # there is no keeper at this moment
            self._closed.wait(_PAUSE_S)


def _name_of_part(name: str, number: int) -> str:
    return f"{name}.{number}"


def _connect(directory: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection.settimeout(ANSWERS_WITHIN)
    try:
        connection.connect(str(directory / SOCKET))
    except OSError as error:
        connection.close()
        raise AnchorGone(f"no process holds memory in {directory}: {error}") from error
    return connection


def _ask(
    directory: Path, request: Mapping[str, object], descriptor: int | None = None
) -> tuple[dict[str, Any], int | None]:
    """The answer, and the descriptor that came with it. EepError if there is none, or if it is a refusal."""
    with _connect(directory) as connection:
        try:
            packet = json.dumps(request).encode()
            socket.send_fds(connection, [packet], [] if descriptor is None else [descriptor])
            answer, descriptors, _, _ = socket.recv_fds(connection, MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise AnchorGone(f"the holder of {directory} does not answer: {error}") from error
    for each in descriptors:
        os.set_inheritable(each, False)
    if not answer:
        raise AnchorGone(f"the holder of {directory} has ended")
    told: dict[str, Any] = json.loads(answer)
    if not told["ok"]:
        raise EepError(f"the holder refused: {told['why']}")
    return told, descriptors[0] if descriptors else None
