"""DeepEP's settings of normal mode. They are kept and have no effect: memory and pieces follow the tokens."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class Config:
    """The arguments are DeepEP's, in its order."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        if self.num_sms < 0:
            raise ValueError(f"num_sms must not be negative, got {self.num_sms}")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """The caller need not provide any bytes for normal mode."""
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """All ranks are on one host."""
        return 0
