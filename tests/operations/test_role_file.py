from __future__ import annotations

from pathlib import Path

from eep.operations.role_file import read_roles, write_roles


def test_roles_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_roles(tmp_path) == frozenset()
    write_roles(tmp_path, (3, 1))
    assert read_roles(tmp_path) == {1, 3}
    write_roles(tmp_path, ())
    assert read_roles(tmp_path) == frozenset()


def test_a_file_that_is_none_of_ours_and_a_directory_that_is_gone_mean_no_role(tmp_path: Path) -> None:
    write_roles(tmp_path, (1,))
    for path in tmp_path.iterdir():
        path.write_bytes(b"\xff[")
    assert read_roles(tmp_path) == frozenset()
    write_roles(tmp_path / "gone", (1,))
