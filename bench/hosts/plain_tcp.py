"""The yardstick between hosts: a loop over plain TCP sockets that moves the same bytes and does nothing else."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Mapping

import torch

from bench.common.fleet import PATIENCE_S
from bench.exchange.contenders import Contender
from bench.exchange.workload import Workload

_PAUSE_S = 0.01


def connect_all(rank: int, port: int, addresses: Mapping[int, str]) -> dict[int, socket.socket]:
    """A socket to each of the ranks of other hosts. The lower rank listens, at ``port`` plus its own number and that of its
    peer, and the higher connects."""
    sockets = {}
    for peer in sorted(addresses):
        if peer == rank:
            continue
        low, high = sorted((rank, peer))
        at = port + 64 * low + high
        sockets[peer] = _accept(addresses[rank], at) if rank == low else _dial(addresses[peer], at)
        sockets[peer].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets[peer].setblocking(False)
    return sockets


def _accept(address: str, port: int) -> socket.socket:
    with socket.create_server((address, port)) as listener:
        listener.settimeout(PATIENCE_S)
        return listener.accept()[0]


def _dial(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=PATIENCE_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)


class PlainTcp(Contender):
    """The bytes that a rank sends to ranks of other hosts, and gets from them, there and back. Those of its own host are
    left out."""

    def __init__(self, work: Workload, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = sockets
        there, back = work.shape.dispatch_row_bytes, work.shape.combine_row_bytes
        to = {peer: work.rows_to[peer] for peer in sockets}
        of = {peer: work.of(peer).rows_to[work.rank] for peer in sockets}
        self._there = self._room(
            {peer: rows * there for peer, rows in to.items()}, {p: r * there for p, r in of.items()}
        )
        self._back = self._room({peer: rows * back for peer, rows in of.items()}, {p: r * back for p, r in to.items()})

    def dispatch(self) -> None:
        self._exchange(*self._there)

    def experts(self) -> None:
        for sent in self._back[0].values():
            sent.fill_(1)

    def combine(self) -> None:
        self._exchange(*self._back)

    def verify(self) -> None:
        for received in (*self._there[1].values(), *self._back[1].values()):
            if not bool((received == 1).all()):
                raise AssertionError("the received bytes differ from those that were sent")

    def _room(
        self, out: dict[int, int], into: dict[int, int]
    ) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        return (
            {peer: torch.ones(size, dtype=torch.uint8) for peer, size in out.items()},
            {peer: torch.zeros(size, dtype=torch.uint8) for peer, size in into.items()},
        )

    def _exchange(self, out: dict[int, torch.Tensor], into: dict[int, torch.Tensor]) -> None:
        leaving = {peer: memoryview(data.numpy()) for peer, data in out.items() if len(data)}
        coming = {peer: memoryview(data.numpy()) for peer, data in into.items() if len(data)}
        while leaving or coming:
            with selectors.DefaultSelector() as selector:
                for peer in leaving.keys() | coming.keys():
                    wanted = (selectors.EVENT_WRITE if peer in leaving else 0) | (
                        selectors.EVENT_READ if peer in coming else 0
                    )
                    selector.register(self._sockets[peer], wanted, peer)
                self._turn(selector, leaving, coming)

    def _turn(
        self, selector: selectors.BaseSelector, leaving: dict[int, memoryview], coming: dict[int, memoryview]
    ) -> None:
        """Moves bytes until some peer is done in one direction."""
        pairs = len(leaving) + len(coming)
        while len(leaving) + len(coming) == pairs:
            for key, events in selector.select(PATIENCE_S):
                peer, connection = key.data, self._sockets[key.data]
                if events & selectors.EVENT_READ and peer in coming:
                    coming[peer] = coming[peer][connection.recv_into(coming[peer]) :]
                    if not coming[peer]:
                        del coming[peer]
                if events & selectors.EVENT_WRITE and peer in leaving:
                    leaving[peer] = leaving[peer][connection.send(leaving[peer]) :]
                    if not leaving[peer]:
                        del leaving[peer]
