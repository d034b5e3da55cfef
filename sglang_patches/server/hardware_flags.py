"""``--eep-watch-devices`` and ``--eep-reactions``: signs of failing hardware, and what they mean for ranks."""

from __future__ import annotations

import argparse
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path

from eep.hardware.nvml_reader import MODULE
from eep.hardware.reaction_table import BadReactions, read_table
from sglang_patches.options import HardwareOptions

logger = logging.getLogger(__name__)


def add_hardware_flags(add: Callable[..., object]) -> None:
    add(
        "--eep-watch-devices",
        choices=("on", "off"),
        default=None,
        help="Whether a process watches the GPUs for failures that their driver reports (Xid, memory errors, heat, fallen "
        "off the bus). It needs the package nvidia-ml-py (default: on with a GPU, if the package is there).",
    )
    add(
        "--eep-reactions",
        metavar="FILE",
        default=None,
        help="A TOML file that says for signs of failing hardware whether their ranks are to 'fence', to 'replace', or only "
        'to \'note\': "xid.74" = "fence". Other signs mean what they mean without it.',
    )


def parse_hardware(arguments: argparse.Namespace, device: str) -> HardwareOptions:
    """SystemExit if devices cannot be watched that are to be, or the file is no such table."""
    if arguments.eep_reactions is not None:
        try:
            read_table(Path(arguments.eep_reactions))
        except BadReactions as error:
            raise SystemExit(f"--eep-reactions: {error}") from error
    is_there = importlib.util.find_spec(MODULE) is not None
    if arguments.eep_watch_devices == "on" and not is_there:
        raise SystemExit("--eep-watch-devices on needs the package nvidia-ml-py: pip install 'eep[hardware]'")
    if arguments.eep_watch_devices is None and device != "cpu" and not is_there:
        logger.info("eep: GPUs are not watched for failures: the package nvidia-ml-py is not installed")
    watched = is_there and (arguments.eep_watch_devices or ("off" if device == "cpu" else "on")) == "on"
    table = None if arguments.eep_reactions is None else str(Path(arguments.eep_reactions).resolve())
    return HardwareOptions(watched=watched, reactions=table)
