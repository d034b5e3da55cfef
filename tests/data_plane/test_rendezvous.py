"""Claiming ranks, finding peers, and what is left when all ranks are gone."""

from __future__ import annotations

import errno
import os
import pathlib
import socket
import stat
import subprocess
import sys
import threading
from typing import Any

import pytest

import eep
from eep import access
from eep.data_plane.memory.exchange import fetch_offer
from tests import moe
from tests.ranks import Ranks

CONFIG = moe.Config(ranks=2, max_ranks=2)


def test_directory_and_sockets_are_private(rendezvous: eep.Rendezvous) -> None:
    with CONFIG.buffer(0, rendezvous):
        assert stat.S_IMODE(rendezvous.path.stat().st_mode) == 0o700
        (path,) = rendezvous.path.glob("*.sock")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_directory_that_others_can_enter_is_refused(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(eep.EepError, match="no other user can enter"):
        eep.Rendezvous(tmp_path)


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="too long"):
        eep.Rendezvous(tmp_path / ("x" * 100))


@pytest.mark.parametrize("when", ["made", "checked"])
def test_a_directory_that_the_last_rank_removes_is_made_again(
    when: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes just before the directory, or the lock in it, is looked at."""
    rendezvous, removals = eep.Rendezvous(tmp_path / "ranks"), iter(range(3))

    def remove() -> None:
        if next(removals, None) is not None:
            rendezvous.remove()

    if when == "made":
        checked = access.check_private
        monkeypatch.setattr(access, "check_private", lambda path: (remove(), checked(path))[1])
    else:
        made = access.make_private
        monkeypatch.setattr("eep.data_plane.rendezvous.make_private", lambda path: (made(path), remove())[0])
    with rendezvous.deserted() as deserted:
        assert deserted
    assert next(removals, None) is None


def test_a_directory_that_is_always_removed_ends_the_wait(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous = eep.Rendezvous(tmp_path / "ranks")
    monkeypatch.setattr("eep.data_plane.rendezvous.make_private", lambda path: rendezvous.remove())
    with pytest.raises(FileNotFoundError), rendezvous.deserted():
        pass


def test_incarnations_count_up(rendezvous: eep.Rendezvous) -> None:
    for expected in range(4):
        with CONFIG.buffer(1, rendezvous) as buffer:
            assert buffer.incarnation == expected
            assert rendezvous.claimed_ranks() == {1: expected}
    assert rendezvous.claimed_ranks() == {}


def test_a_live_rank_cannot_be_claimed_again(rendezvous: eep.Rendezvous) -> None:
    with Ranks(rendezvous, CONFIG) as group:
        group.start([0, 1])
        group.connect([0, 1])
        with pytest.raises(eep.RankInUse, match=rf"rank 0 is alive \(incarnation 0, process {group[0].pid}\)"):
            CONFIG.buffer(0, rendezvous)
        with pytest.raises(eep.RankInUse, match="stale"):
            CONFIG.buffer(0, rendezvous, incarnation=0)
        group.check_steps((0, 1), seed=1)


def test_a_killed_rank_leaves_its_number_free(rendezvous: eep.Rendezvous) -> None:
    with Ranks(rendezvous, CONFIG) as group:
        group.start([0])
        group[0].kill()
        assert rendezvous.claimed_ranks() == {}
        with CONFIG.buffer(0, rendezvous) as buffer:
            assert buffer.incarnation == 1
            assert not list(rendezvous.path.glob("r0.i0.*"))  # what the dead one left was swept


def test_nothing_is_left_when_all_are_killed(rendezvous: eep.Rendezvous) -> None:
    with Ranks(rendezvous, CONFIG) as group:
        group.start([0, 1])
        group.connect([0, 1])
        pids = [group[rank].pid for rank in (0, 1)]
        for rank in (0, 1):
            group[rank].kill()
    assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids)
    rendezvous.close()
    assert not rendezvous.path.exists()


def test_what_a_killed_launcher_left_is_swept_by_the_next() -> None:
    program = "import eep, os, signal; print(eep.Rendezvous.temporary().path, flush=True); os.kill(os.getpid(), 9)"
    left = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60).stdout.strip()
    assert os.path.isdir(left)
    with eep.Rendezvous.temporary():
        assert not os.path.exists(left)


def test_who_does_not_speak_the_protocol_gets_nothing(rendezvous: eep.Rendezvous) -> None:
    with CONFIG.buffer(0, rendezvous) as buffer:
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, b"EEP"):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(30)
                connection.connect(str(rendezvous.path / "r0.i0.sock"))
                connection.sendall(words)
                connection.shutdown(socket.SHUT_WR)
                try:
                    answer, fds, _, _ = socket.recv_fds(connection, 4096, 8)
                except ConnectionResetError:
                    continue
                assert (answer, fds) == (b"", [])
        # It still answers those who do.
        fetch_offer(rendezvous, 0, 0, buffer.shape, buffer.region).close()
        assert buffer.refused_requests == 3


def test_a_rank_without_descriptors_for_a_moment_answers_afterwards(
    rendezvous: eep.Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failures = socket.socket.accept, iter(range(3))

    def failing(listening: socket.socket) -> Any:
        if next(failures, None) is not None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", failing)
    with CONFIG.buffer(0, rendezvous) as buffer:
        fetch_offer(rendezvous, 0, 0, buffer.shape, buffer.region).close()
        assert buffer.refused_requests == 3
        answering = next(thread for thread in threading.enumerate() if thread.name == "eep-r0.i0")
        assert answering.is_alive()
    assert not answering.is_alive()


def test_buffers_made_differently_do_not_connect(rendezvous: eep.Rendezvous) -> None:
    with (
        CONFIG.buffer(0, rendezvous),
        moe.Config(ranks=2, max_ranks=2, hidden=512).buffer(1, rendezvous) as other,
    ):
        with pytest.raises(ValueError, match="hidden is 256 there and 512 here"):
            other.connect_ranks([0])
        assert other.view == eep.View.empty(2)


def test_a_rank_that_never_comes_ends_the_wait(rendezvous: eep.Rendezvous) -> None:
    with CONFIG.buffer(0, rendezvous) as buffer:
        with pytest.raises(eep.PeerUnreachable, match="rank 1 is not there"):
            buffer.connect_ranks([1], timeout=0.05)
        with pytest.raises(eep.PeerUnreachable, match="the others must connect to it first"):
            buffer.join(timeout=0.05)
        assert buffer.view.epoch == 0


def test_a_rank_that_claims_nothing_is_alone_until_it_is_told_which_life_it_is(rendezvous: eep.Rendezvous) -> None:
    with CONFIG.buffer(0, rendezvous) as other, CONFIG.buffer(1, rendezvous, claims=False) as spare:
        with CONFIG.buffer(1, rendezvous) as lost:
            view = other.connect_ranks([1])
            lost.apply_view(view)
            spare.start_alone()
            assert rendezvous.claimed_ranks() == {0: 0, 1: 0}
            assert (spare.rank, spare.view.active) == (1, (1,))
            with pytest.raises(eep.RankInUse, match="stale"):
                spare.claim(0)
        other.disconnect_ranks([1])
        spare.claim(1)
        view = other.connect_ranks([1])
        assert view.incarnations == (0, 1)
        assert spare.apply_view(view) == view
        with pytest.raises(eep.EepError, match="is incarnation 1 of rank 1 already"):
            spare.claim(2)
    assert rendezvous.claimed_ranks() == {}
