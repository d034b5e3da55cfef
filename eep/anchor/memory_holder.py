"""Holds memory by descriptor for processes that may be killed. The keeper does this beside its own work.

A process that has no GPU open can hold memory of a GPU all the same, and never looks into what it holds. One packet over a
Unix socket is one request, a JSON object, and one packet is its answer:

    hold     with one descriptor: keep this for a rank, under a name, in place of what an earlier life of it had
    find     answers with the descriptor, its size, and the life that it is from
    drop     let go of what a rank had in this life and in earlier ones: of all, or of what has a name
    list     what is held

Only processes of the same user are heard, and no request can make the holder wait. Everything is let go when it ends.

The keeper loads this file by its path, without the package around it: it imports nothing of EEP.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from contextlib import suppress
from typing import Any

MAX_PACKET = 1 << 16
MAX_HELD = 1 << 14
MAX_NAME = 64


class Refused(Exception):
    """What is wrong with a request."""


class MemoryHolder:
    """Serves for as long as its owner waits for something else (:meth:`wait`)."""

    def __init__(self, path: str) -> None:
        self._held: dict[tuple[int, str], tuple[int, int, int]] = {}
        """Rank and name: the life, the size, the descriptor."""
        self._connections: set[socket.socket] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        with suppress(FileNotFoundError):
            os.unlink(path)  # of a keeper that was killed
        os.fchmod(self._socket.fileno(), 0o600)
        self._socket.bind(path)
        self._socket.listen(256)

    def wait(self, *others: int) -> list[int]:
        """Serves whatever comes, until one of ``others`` can be read; which of them can."""
        while True:
            connections = {each.fileno(): each for each in self._connections}
            waiting = select.poll()  # select() knows no descriptor above 1023, and what is held may take as many
            for number in (*others, self._socket.fileno(), *connections):
                waiting.register(number, select.POLLIN)
            ready = [number for number, _ in waiting.poll()]
            for number in ready:
                if number == self._socket.fileno():
                    self._accept()
                elif number in connections:
                    self._serve(connections[number])
            if found := [number for number in ready if number in others]:
                return found

    def _accept(self) -> None:
        with suppress(OSError):  # it has gone again, or there are no descriptors left
            connection, _ = self._socket.accept()
            connection.setblocking(False)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", credentials)[1] == os.geteuid():
                self._connections.add(connection)
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        received: list[int] = []
        try:
            packet, received, flags, _ = socket.recv_fds(connection, MAX_PACKET, 1)
            if not packet:
                raise OSError("the peer is gone")
            try:
                if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                    raise Refused("a request is one packet with one descriptor at most")
                answer, descriptors = self._answer(packet, received)
            except (Refused, ValueError, KeyError, TypeError) as error:
                answer, descriptors = {"ok": False, "why": str(error)}, []
            socket.send_fds(connection, [json.dumps(answer).encode()], descriptors)
        except OSError:
            self._connections.discard(connection)
            connection.close()
        finally:
            for descriptor in received:
                os.close(descriptor)

    def _answer(self, packet: bytes, received: list[int]) -> tuple[dict[str, Any], list[int]]:
        """What is taken over is removed from ``received``."""
        request = json.loads(packet)
        if request["do"] == "list":
            return {"ok": True, "held": [self._described(*key) for key in sorted(self._held)]}, []
        if request["do"] == "drop":
            self._drop(int(request["rank"]), int(request["incarnation"]), request.get("name"))
            return {"ok": True}, []
        rank, name = int(request["rank"]), str(request["name"])
        if request["do"] == "hold":
            self._hold((rank, name), int(request["incarnation"]), int(request["size"]), received)
            return {"ok": True}, []
        if request["do"] != "find":
            raise Refused(f"there is no request {request['do']!r}")
        if (rank, name) not in self._held:
            raise Refused(f"nothing is held as {name} for rank {rank}")
        return {"ok": True, **self._described(rank, name)}, [self._held[rank, name][2]]

    def _hold(self, key: tuple[int, str], life: int, size: int, received: list[int]) -> None:
        if len(received) != 1:
            raise Refused("to hold memory, send its descriptor along")
        if len(key[1]) > MAX_NAME or size <= 0 or life < 0:
            raise Refused("a name has at most 64 characters, a size is positive, and a life is not negative")
        before = self._held.get(key)
        if before is not None and before[0] > life:
            raise Refused(f"a later life of rank {key[0]}, {before[0]}, has {key[1]} already")
        if before is None and len(self._held) >= MAX_HELD:
            raise Refused(f"{MAX_HELD} pieces of memory are held already")
        self._held[key] = (life, size, received.pop())
        if before is not None:
            os.close(before[2])

    def _drop(self, rank: int, life: int, name: str | None) -> None:
        for key in [key for key, (of, _, _) in self._held.items() if key[0] == rank and of <= life]:
            if name is not None and key[1] != name:
                continue
            os.close(self._held.pop(key)[2])

    def _described(self, rank: int, name: str) -> dict[str, Any]:
        life, size, _ = self._held[rank, name]
        return {"rank": rank, "name": name, "incarnation": life, "size": size}
