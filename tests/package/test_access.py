"""Private directories and the user behind a socket."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

import eep
from eep import access


def test_a_private_directory_is_made_once_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    assert access.make_private(path) == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700  # another process may name it, too
    assert access.make_private(path) == path


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o755])
def test_a_directory_that_other_users_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(access.NotPrivate, match="no other user can enter") as caught:
        access.make_private(tmp_path)
    assert isinstance(caught.value, PermissionError)
    assert isinstance(caught.value, eep.EepError)


def test_a_link_to_a_private_directory_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(access.make_private(tmp_path / "private"))
    with pytest.raises(access.NotPrivate):
        access.make_private(link)


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, user = access.make_private(tmp_path / "private"), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(access.NotPrivate):
        access.check_private(path)


def test_temporary_directories_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = access.make_temporary()
    assert path.parent == tmp_path
    assert access.check_private(path) == path


def test_the_kernel_says_which_process_is_at_the_other_end() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        found = access.peer_credentials(here)
    assert found == access.PeerCredentials(os.getpid(), os.geteuid(), os.getegid())
    assert found.is_same_user


def test_a_path_too_long_for_a_socket_is_refused() -> None:
    assert access.check_socket_path("/" * 107)
    with pytest.raises(ValueError, match="too long for a Unix socket"):
        access.check_socket_path("/" * 108)
