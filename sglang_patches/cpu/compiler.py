"""Ranks on a CPU compile nothing, although SGLang marks some of its functions for ``torch.compile``.

On a CPU torch has g++ write its libraries and headers straight into a cache that all processes of a user share. A rank that
is killed meanwhile leaves half a file there, and every rank that loads it ends. No other cache directory would mend that:
torch keeps the headers below the default one in any case. It would also be of no use to compile. The functions in question
take less than a millisecond as they are, and a first call takes half a minute, in the middle of a step of all ranks.

On a GPU torch compiles with Triton, which gives a file its name when the file is whole.
"""

from __future__ import annotations

import torch


def switch_off() -> None:
    """Have this process run functions as they are written, also those that were marked before."""
    torch.compiler.set_stance("force_eager")
