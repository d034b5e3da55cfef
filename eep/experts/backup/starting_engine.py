"""A transfer engine that starts while its rank does other things: the first call that needs it waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from eep.errors import EepError
from eep.experts.backup.transfer_engine import Engine
from eep.experts.backup.transport import TransferFailed, Transport

if TYPE_CHECKING:
    import torch

    from eep.data_plane.memory.shm import SharedMemory

_STARTED_WITHIN_S = 60.0


class StartingEngine:
    """A :class:`Transport` at ``address``. If the engine does not start, :class:`EepError` says why: from every call, and not
    from here."""

    def __init__(self, address: str, protocol: str = "tcp", device: str = "") -> None:
        starter = ThreadPoolExecutor(1, thread_name_prefix="eep-engine")
        self._engine: Future[Engine] = starter.submit(Engine, address, protocol, device)
        starter.shutdown(wait=False)
        self._address = address

    @property
    def session(self) -> str:
        return self._started().session

    def expose(self, memory: SharedMemory) -> int:
        return self._started().expose(memory)

    def withdraw(self, address: int) -> None:
        self._started().withdraw(address)

    def read(self, session: str, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        try:
            engine = self._started()
        except (EepError, ValueError) as error:
            raise TransferFailed(str(error)) from error
        engine.read(session, parts)

    def _started(self) -> Transport:
        try:
            return self._engine.result(_STARTED_WITHIN_S)
        except TimeoutError as error:
            raise EepError(f"Mooncake has not started on {self._address}") from error
