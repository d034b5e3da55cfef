"""Triton compiles kernels in the process that wants them, the first time that it wants them: for a second, in the middle of a
step. From outside that looks like a loop without end. Other compilers are processes of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable


def tell(listener: Callable[[], object]) -> None:
    """From now on ``listener`` hears before Triton compiles a kernel."""
    from triton.compiler import ASTSource

    read = ASTSource.__init__

    @functools.wraps(read)
    def read_and_tell(*arguments: object, **named: object) -> None:
        listener()
        read(*arguments, **named)

    # Triton's own hook would have it describe the kernel as JSON first, which not every kernel can be.
    ASTSource.__init__ = read_and_tell
