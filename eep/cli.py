"""``eep``: what an operator types.

    eep status [--json] [--watch [SECONDS]]      show where a server stands and what it waits for
    eep events [--follow] [--json]               print the event log, one line per transition
    eep scale N                                  have so many ranks
    eep rank remove|launch|replace|kill RANK     ask for a change; safe to repeat with the same --operation
    eep rank role RANK experts|both              have a rank serve experts only, or requests too
    eep evidence REASON --rank R|--device D      tell it that hardware fails
    eep drain, eep undrain                       accept no new requests, and accept them again
    eep fault kill|stop|cont|slow|drop RANK ...  cause a fault in a rank of a running server
    eep fault arm RANK --point P --action A ...  the same when the rank passes a named point; disarm undoes it
    eep fault drill [--seconds S]                kill ranks at random
    eep backup serve ...                         keep experts in this host's memory, for repair
    eep anchor serve|status|release --dir D      hold the weights of servers that come and go
    eep size --hidden H --topk K                 how much memory the exchange of tokens takes
    eep make-model PATH [--family F] [--size S] [--fp8]
                                                 write a random MoE model, to try a server with
    eep completion bash|zsh|fish                 what a shell needs to complete these words

A command finds the server of its user on this host by itself; ``--dir`` or ``--url`` names another.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eep.anchor.command import register as register_anchor
from eep.console.evidence_command import register_evidence
from eep.console.printable import printable
from eep.console.server_choice import add_directory
from eep.console.server_commands import register as register_server_commands
from eep.console.shell_completion import SHELLS, script_for
from eep.console.size_command import register_size
from eep.drill.command import register as register_faults
from eep.experts.backup.command import register as register_backup

INTERRUPTED = 130
_EXIT_CODES = (
    "Exit codes: 0 done; 1 an error; 2 a wrong command line; 3 the operation failed and was taken back; 4 it has not ended; "
    "130 Ctrl-C."
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except BrokenPipeError:  # the reader of the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still in the buffer goes nowhere
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except FileNotFoundError as error:
        print(
            f"eep: there is no {error.filename}; --dir must name the directory of a running supervisor", file=sys.stderr
        )
        return 1
    except (OSError, ValueError) as error:
        print("eep:", "\n".join(map(printable, str(error).splitlines())), file=sys.stderr)
        return 1


class _ShowVersion(argparse.Action):
    """It is looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            parser.exit(message=f"eep {version('eep')}\n")
        except PackageNotFoundError:
            parser.exit(message="eep, which is not installed: it runs from its sources\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eep", description="Elastic expert parallelism, for operators.", epilog=_EXIT_CODES
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show which version this is, and end")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    register_server_commands(commands)
    register_evidence(commands)
    add_directory(register_faults(commands))
    register_backup(commands)
    register_anchor(commands)
    register_size(commands)
    model = commands.add_parser("make-model", help="write a random MoE checkpoint with its tokenizer")
    model.add_argument("path", type=Path, help="a directory that does not exist yet, or is empty")
    model.add_argument(
        "--family",
        choices=("qwen3", "deepseek-v3", "glm4-moe", "gpt-oss"),
        default="qwen3",
        help="the kind of model: its attention, its gate, and what it has beside experts (default: qwen3)",
    )
    model.add_argument("--seed", type=int, default=0, help="the same seed gives the same weights (default: 0)")
    model.add_argument(
        "--size",
        choices=("tiny", "small", "large"),
        default="tiny",
        help="tiny: 15 MB, for a CPU; small: hidden 1024, 140 MB, for drills on a GPU; large: 8 layers, hidden 2048, 32 "
        "experts, 2.6 GB, for measuring on one (default: tiny)",
    )
    model.add_argument("--fp8", action="store_true", help="experts in fp8, a scale for each 128 x 128 weights")
    model.set_defaults(run=_make_model)
    completion = commands.add_parser("completion", help="print what a shell needs to complete the words of eep")
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(run=_completion)
    return parser


def _completion(options: argparse.Namespace) -> int:
    print(script_for(options.shell, _parser()))
    return 0


def _make_model(options: argparse.Namespace) -> int:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ValueError("making a model needs the transformers package: pip install transformers") from None
    from eep.drill.models.checkpoint import make_model

    made = make_model(options.path, options.seed, options.size, family=options.family, fp8=options.fp8)
    print(f"wrote {made}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
