"""DeepEP's normal mode, which is for prefill and training: each of its calls raises, and names what to use instead."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from eep.compat.config import Config
from eep.errors import EepError


def _refuse(name: str) -> NoReturn:
    raise EepError(
        f"{name} belongs to DeepEP's normal mode, which eep.compat.deep_ep does not support; use low_latency_dispatch "
        "and low_latency_combine, in pieces if there are more tokens than they take, or eep.Buffer"
    )


class NormalMode:
    """The calls by name, so that the caller reads what to do instead of an AttributeError."""

    num_sms: ClassVar[int] = 20

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Kept for :class:`Config`; kernels take what they need."""
        if new_num_sms < 0 or new_num_sms % 2:
            raise ValueError(f"the number of multiprocessors must be even, got {new_num_sms}")
        cls.num_sms = new_num_sms

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        return Config(cls.num_sms)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        return Config(cls.num_sms)

    def get_dispatch_layout(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("get_dispatch_layout")

    def dispatch(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("dispatch")

    def combine(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("combine")

    def internode_dispatch(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("internode_dispatch")

    def internode_combine(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("internode_combine")

    def get_local_buffer_tensor(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("get_local_buffer_tensor")
