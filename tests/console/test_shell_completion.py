from __future__ import annotations

import shutil
import subprocess

import pytest

from eep import cli
from eep.console.shell_completion import script_for, words_of

_ASK = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _eep; printf "%s\\n" "${COMPREPLY[@]}"'


def complete(*words: str) -> list[str]:
    """What bash proposes for the last word."""
    script = subprocess.run(
        ["bash", "-c", _ASK, "/dev/stdin", "eep", *words],
        input=script_for("bash", cli._parser()),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return script.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_actions_and_options() -> None:
    assert complete("st") == ["status"]
    assert complete("rank", "re") == ["remove", "replace"]
    assert complete("status", "--w") == ["--watch"]
    assert complete("anchor", "serve", "--d") == ["--dir"]
    assert complete("scale", "6", "--ur") == ["--url"]


def test_every_command_has_its_words() -> None:
    words = words_of(cli._parser())
    assert {"status", "events", "scale", "drain", "rank"} <= set(words[""])
    assert "--follow" in words["events"]
