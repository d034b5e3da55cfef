"""``eep size``."""

from __future__ import annotations

import pytest

from eep.cli import main

MODEL = ("size", "--hidden", "7168", "--topk", "8")


def table(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    """The rows that it prints, without the heads and the sentence below."""
    assert main([*MODEL, *arguments]) == 0
    return [
        line.replace(" MB", "MB").replace(" GB", "GB").split() for line in capsys.readouterr().out.splitlines()[1:-1]
    ]


def test_memory_grows_with_ranks_and_with_tokens_up_to_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert table(capsys, "--ranks", "8,64", "--tokens", "128,4096") == [
        ["128", "8", "128", "1", "59.3MB", "0.1MB", "12.9MB"],
        ["128", "64", "128", "1", "474.5MB", "1.0MB", "116.1MB"],
        ["4096", "8", "4096", "1", "1.9GB", "4.2MB", "412.9MB"],
        ["4096", "64", "1158", "4", "4.3GB", "9.5MB", "1.1GB"],
    ]


def test_an_operator_sees_what_a_flag_of_the_server_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = table(capsys, "--ranks", "256", "--tokens", "4096", "--portion-tokens", "128")
    assert row[2:5] == ["128", "32", "1.9GB"]
    (decode,) = table(capsys, "--ranks", "64", "--tokens", "128", "--layout", "expert", "--wire", "fp8", "--slots", "2")
    assert decode[4:] == ["1.1GB", "356.1MB", "925.4MB"]


def test_it_says_how_many_ranks_there_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, "--ranks", "512"]) == 0
    assert capsys.readouterr().out.endswith("There may be 512 ranks on CPUs, and 64 on GPUs.\n")


@pytest.mark.parametrize(
    "wrong",
    [
        ("--ranks", "8,"),
        ("--ranks", "0"),
        ("--tokens", "many"),
        ("--portion-tokens", "0"),
        ("--wire", "int4"),
        ("--layout", "column"),
        ("--slots", "0"),
    ],
)
def test_what_is_no_size_is_refused(capsys: pytest.CaptureFixture[str], wrong: tuple[str, str]) -> None:
    assert main([*MODEL, *wrong]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("eep: ")
