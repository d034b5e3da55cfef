"""``eep completion``: what a shell needs to complete the words of ``eep``, made from its parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")


def words_of(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """The words that may follow each command: ``""`` for ``eep`` itself, ``"rank"`` for ``eep rank``, and so on."""
    found: dict[str, list[str]] = {}
    _collect("", parser, found)
    return found


def _collect(name: str, parser: argparse.ArgumentParser, found: dict[str, list[str]]) -> None:
    words = found.setdefault(name, [])
    for action in parser._actions:
        words += [option for option in action.option_strings if option.startswith("--")]
        if isinstance(action, argparse._SubParsersAction):
            for each, below in action.choices.items():
                words.append(each)
                _collect(f"{name} {each}".strip(), below, found)
        elif action.choices and not action.option_strings:
            words += map(str, action.choices)


def script_for(shell: str, parser: argparse.ArgumentParser) -> str:
    """To be read by a shell of that kind: ``source <(eep completion bash)``, ``eep completion fish | source``."""
    if shell == "fish":
        return "\n".join([*_fish_lines(parser), ""])
    loads = ["autoload -U +X compinit bashcompinit && compinit && bashcompinit"] if shell == "zsh" else []
    return "\n".join([*loads, *_lines(parser), ""])


def _lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    # In words that bash and zsh share: zsh has no slices of arrays with a variable in them, and its "path" is $PATH.
    commands = words_of(parser)
    known = "|".join(f'" {name}"' for name in commands if name)
    yield "_eep() {"
    yield '    local word=${COMP_WORDS[COMP_CWORD]} command="" number'
    yield "    for ((number = 1; number < COMP_CWORD; number++)); do"
    yield '        case "$command ${COMP_WORDS[number]}" in'
    yield f'            {known}) command="$command ${{COMP_WORDS[number]}}" ;;'
    yield "        esac"
    yield "    done"
    yield '    case "$command" in'
    for name, words in commands.items():
        pattern = f'" {name}"' if name else '""'
        yield f"        {pattern}) COMPREPLY=($(compgen -W '{' '.join(words)}' -- \"$word\")) ;;"
    yield "    esac"
    yield "}"
    yield "complete -F _eep eep"


def _fish_lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    commands = words_of(parser)
    known = " ".join(f'" {name}"' for name in commands if name)
    yield "function __eep_words"
    yield '    set -l path ""'
    yield "    for each in (commandline -opc)"
    yield '        switch "$path $each"'
    yield f"            case {known}"
    yield '                set path "$path $each"'
    yield "        end"
    yield "    end"
    yield '    switch "$path"'
    for name, words in commands.items():
        yield f'        case "{" " if name else ""}{name}"'
        yield f"            printf '%s\\n' {' '.join(words)}"
    yield "    end"
    yield "end"
    yield "complete -c eep -f -a '(__eep_words)'"
