from __future__ import annotations

import socket
from pathlib import Path

import pytest

from eep.console.server_finder import NoServer, choose_server, find_servers, listening_directories

TABLE = """Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 22834 /run/user/7/eep-a/control.sock
0000000000000000: 00000003 00000000 00000000 0001 03 22835 /run/user/7/eep-a/control.sock
0000000000000000: 00000002 00000000 00010000 0001 01 22836 /run/with space/control.sock
0000000000000000: 00000002 00000000 00010000 0001 01 22837 /run/docker.sock
0000000000000000: 00000002 00000000 00010000 0001 01 22838 @abstract/control.sock
0000000000000000: 00000003 00000000 00000000 0002 01 22839
"""


def test_a_supervisor_is_known_by_the_socket_on_which_it_listens() -> None:
    found = listening_directories(TABLE.splitlines())
    assert found == [Path("/run/user/7/eep-a"), Path("/run/with space"), Path("@abstract")]


def test_only_a_private_directory_with_a_key_counts(tmp_path: Path) -> None:
    place = tmp_path / "d"
    place.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "control.sock"))
        listener.listen()
        assert place not in find_servers()
        (place / "key").touch(mode=0o600)
        assert place in find_servers()
        place.chmod(0o755)
        assert place not in find_servers()
    place.chmod(0o700)
    assert place not in find_servers(), "none listens there any more"


def test_the_only_server_is_chosen_and_otherwise_the_text_says_what_to_do() -> None:
    assert choose_server([Path("/a")]) == Path("/a")
    with pytest.raises(NoServer, match="--url"):
        choose_server([])
    with pytest.raises(NoServer, match="--dir /b"):
        choose_server([Path("/a"), Path("/b")])
