from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from eep import cli
from eep.console.shell_completion import SHELLS, script_for, words_of

_BASH = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _eep; printf "%s\\n" "${COMPREPLY[@]}"'
_ZSH = """
source $1; shift
typeset -a COMP_WORDS=("$@"); typeset COMP_CWORD=$(($# - 1))
compgen -F _eep
"""
_FISH = 'source $argv[1]; complete -C "$argv[2..-1]"'
_COMMANDS = {"bash": ["bash", "-c", _BASH], "zsh": ["zsh", "-fc", _ZSH, "zsh"], "fish": ["fish", "-N", "-c", _FISH]}


@pytest.fixture(params=SHELLS)
def complete(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., list[str]]:
    """What a shell proposes for the last word."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}, as Debian has it")
    script = tmp_path / "script"
    script.write_text(script_for(shell, cli._parser()))

    def ask(*words: str) -> list[str]:
        told = subprocess.run(
            [*_COMMANDS[shell], str(script), "eep", *words],
            env={**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "ZDOTDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert told.stderr == ""
        # zsh is given all words that may come, and keeps those that begin as the last one does.
        return [word for word in told.stdout.split() if shell != "zsh" or word.startswith(words[-1])]

    return ask


def test_a_shell_completes_commands_actions_and_options(complete: Callable[..., list[str]]) -> None:
    assert complete("st") == ["status"]
    assert sorted(complete("rank", "re")) == ["remove", "replace"]
    assert complete("status", "--w") == ["--watch"]
    assert complete("anchor", "serve", "--d") == ["--dir"]
    assert complete("scale", "6", "--ur") == ["--url"]


def test_every_command_has_its_words() -> None:
    words = words_of(cli._parser())
    assert {"status", "events", "scale", "drain", "rank"} <= set(words[""])
    assert "--follow" in words["events"]
