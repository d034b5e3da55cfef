"""Stand-ins for two packages that SGLang imports and that have no build for a CPU machine.

``sgl_kernel`` has no CPU wheel, and ``torchvision`` is built for a CUDA torch. On the paths that we serve SGLang imports
functions of them and calls none (they are for speculative decoding and images). So each name is a function that raises. A
package that is installed stays.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

logger = logging.getLogger(__name__)


def provide_sgl_kernel() -> None:
    """A stand-in for ``sgl_kernel``. It has no submodules: SGLang can do without those."""
    if not _provide("sgl_kernel"):
        return
    logger.warning("sgl_kernel is not installed: attention and experts run on torch's own operators")
    from sglang.srt import utils
    from sglang.srt.utils import common

    # On ARM, as this function tells it, SGLang expects the operators of sgl_kernel. is_cpu() calls it too and remembers its
    # answer, so it must be asked before.
    common.is_cpu()
    utils.is_host_cpu_arm64 = common.is_host_cpu_arm64 = _has_no_kernels


def _has_no_kernels() -> bool:
    return False


def provide_torchvision() -> None:
    """A stand-in for what SGLang imports of ``torchvision`` at its top level. Models that read images cannot use it."""
    # Transformers looks once for installed packages. It must do so before, or it takes the stand-in for the real one.
    import sglang  # noqa: F401
    import transformers

    if not _provide("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
        return
    # SGLang registers image processors with this class, and without torchvision transformers has a dummy in its place.
    automatic = importlib.import_module("transformers.models.auto.image_processing_auto")
    setattr(transformers, "AutoImageProcessor", automatic.AutoImageProcessor)  # noqa: B010  (a lazy module has no such name)
    logger.warning("torchvision is not installed: models that read images cannot be served")


def _provide(*names: str) -> bool:
    if names[0] in sys.modules or importlib.util.find_spec(names[0]) is not None:
        return False
    for name in names:
        module = _StandIn(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)  # find_spec() refuses modules without one
        sys.modules[name] = module
    return True


class _StandIn(ModuleType):
    """A module of which every attribute is a function that raises."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in sys.modules:
            return sys.modules[full]  # type: ignore[return-value]

        def absent(*_: object, **__: object) -> NoReturn:
            raise RuntimeError(
                f"{full} was called, but {self.__name__} is not installed: it has no build for this machine"
            )

        return absent
