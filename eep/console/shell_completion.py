"""``eep completion``: what a shell needs to complete the words of ``eep``, made from its parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

SHELLS = ("bash", "zsh")


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
    """To be read by a shell of that kind: ``source <(eep completion bash)``."""
    return "\n".join(
        [*(["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []), *_lines(parser), ""]
    )


def _lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield "_eep() {"
    yield '    local word=${COMP_WORDS[COMP_CWORD]} path="" each'
    yield '    for each in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do'
    yield '        case "$path $each" in'
    commands = words_of(parser)
    known = "|".join(f'" {name}"' for name in commands if name)
    yield f'            {known}) path="$path $each" ;;'
    yield "        esac"
    yield "    done"
    yield '    case "$path" in'
    for name, words in commands.items():
        pattern = f'" {name}"' if name else '""'
        yield f"        {pattern}) COMPREPLY=($(compgen -W '{' '.join(words)}' -- \"$word\")) ;;"
    yield "    esac"
    yield "}"
    yield "complete -F _eep eep"
