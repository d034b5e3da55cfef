"""What a rank process of a test can be told to do."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import torch

import eep
import eep.data_plane.tokens
from eep import faults
from eep.abi import native
from eep.abi.native import Mailbox
from tests import moe

PATIENCE_S = 150.0
"""For an answer. A rank that imports the parts of torch that few programs need takes a minute and more on a busy machine."""
BEGUN = "begun"


class RankProgram:
    """What a rank can be told to do. Answers must be plain values or tensors."""

    tell: Callable[[str], None]
    """Sends the test a word before the answer."""
    _tells_when_begun = False

    def __init__(self, rank: int, path: str, config: moe.Config, timeout_ms: float, incarnation: int | None) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.buffer = config.buffer(rank, path, timeout_ms=timeout_ms, incarnation=incarnation)

    def hello(self) -> tuple[int, int]:
        return self.buffer.rank, self.buffer.incarnation

    def connect(self, ranks: list[int], epoch: int | None = None, timeout: float = PATIENCE_S) -> eep.View:
        return self.buffer.connect_ranks(ranks, epoch=epoch, timeout=timeout)

    def disconnect(self, ranks: list[int], epoch: int | None = None) -> eep.View:
        return self.buffer.disconnect_ranks(ranks, epoch=epoch)

    def prepare(self) -> None:
        self.buffer.prepare()

    def apply(self, view: eep.View, timeout: float = PATIENCE_S) -> eep.View:
        return self.buffer.apply_view(view, timeout=timeout)

    def join(self) -> eep.View:
        return self.buffer.join(timeout=PATIENCE_S)

    def warm_up(self) -> None:
        """A step alone, before any peer waits for this rank: on a GPU the first step loads the kernels."""
        self.start_alone()
        moe.step(self.buffer, self.config, 0, (self.buffer.rank,))

    def start_alone(self) -> None:
        """A view of this rank only. It has the first epoch, so that ranks that count views themselves go on from there."""
        self.buffer.connect_ranks([])

    def barrier(self) -> None:
        self.buffer.barrier(PATIENCE_S)

    def step(self, seed: int, active: tuple[int, ...], count: int = 1) -> tuple[list[torch.Tensor], eep.Status]:
        """Up to ``count`` steps, ended by the first that cannot be trusted; the results of the others."""
        outputs: list[torch.Tensor] = []
        for i in range(count):
            output = moe.step(self.buffer, self.config, seed + i, active)
            if not self.buffer.status().ok:
                break
            outputs.append(output)
            self.one_is_over()
        return outputs, self.buffer.status()

    def tell_when_begun(self) -> None:
        """The next call of many steps says :data:`BEGUN` when the first of them is over and can be trusted."""
        self._tells_when_begun = True

    def one_is_over(self) -> None:
        if self._tells_when_begun:
            self._tells_when_begun = False
            self.tell(BEGUN)

    def dispatch_only(self, seed: int, active: tuple[int, ...]) -> tuple[list[int], eep.Status]:
        batch = moe.make_batch(self.config, self.buffer.rank, seed, active).to(self.config.device)
        self.received = self.buffer.dispatch(batch.x, batch.topk_idx, batch.topk_weights)
        return self.received.rank_counts.tolist(), self.buffer.status()

    def finish_step(self) -> eep.Status:
        """The combine of the last :meth:`dispatch_only`."""
        self.buffer.combine(moe.run_experts(self.buffer, self.received), self.received)
        return self.buffer.status()

    def view(self) -> eep.View:
        return self.buffer.view

    def status(self) -> eep.Status:
        return self.buffer.status()

    def revoke(self) -> None:
        self.buffer.revoke()

    def signal_of(self, rank: int) -> int:
        """The last word by which that rank told this one that it waits for it."""
        return int(Mailbox.from_buffer_copy(self.mailbox_of(rank, ctypes.sizeof(Mailbox))).dispatch_flag)

    def signals_of(self, ranks: Iterable[int]) -> dict[int, int]:
        return {rank: self.signal_of(rank) for rank in ranks}

    def wait_for_signals(self, before: Mapping[int, int]) -> None:
        """Waits until each of these ranks has signalled again: then it waits for this one. ``before``: its last signal."""
        end = time.monotonic() + PATIENCE_S
        while silent := [rank for rank, signal in before.items() if self.signal_of(rank) == signal]:
            assert time.monotonic() < end, f"ranks {silent} sent rank {self.buffer.rank} no signal"
            time.sleep(0.002)

    def set_timeout(self, milliseconds: float) -> None:
        self.buffer.timeout_ms = milliseconds

    def arm(self, point: str, action: str, skip: int = 0, sleep_ms: float = 0) -> None:
        faults.arm(point, action, skip=skip, sleep_ms=sleep_ms)

    def addresses(self) -> list[int]:
        """Everything that a captured graph would hold a pointer to."""
        tensors = self.buffer.tokens_of(
            eep.data_plane.tokens.Sent(torch.zeros(0, self.config.topk, dtype=torch.int64), None, self.config.wire, 0)
        )
        return [
            ctypes.addressof(self.buffer.table),
            self.buffer.combine_input().data_ptr(),
            tensors.x.data_ptr(),
            tensors.rank_counts.data_ptr(),
        ]

    def scribble_flags(self, seed: int) -> None:
        """Writes garbage over every flag word of this rank's region, as a lying peer with a mapping could."""
        random = torch.Generator().manual_seed(seed)
        for slot in range(2 * self.config.max_ranks):
            mailbox = Mailbox.from_address(self.buffer.region.address + slot * ctypes.sizeof(Mailbox))
            words = torch.randint(-(2**62), 2**62, (4,), generator=random).tolist()
            mailbox.dispatch_flag, mailbox.envelope, mailbox.combine_flag, mailbox.barrier_flag = words

    def mailbox_of(self, rank: int, size: int, offset: int = 0) -> bytes:
        """What that rank has written into its mailbox here. The region may be on a GPU."""
        slot = self.buffer.table.peers[rank].slot
        return bytes(self.buffer.region.bytes_at(offset + slot * size, size).tolist())

    def scribble_table(self, rank: int, field: str, value: int) -> None:
        setattr(self.buffer.table.peers[rank], field, value)
        self.buffer.context.publish_table()

    def send_message(self, to: int, count: int, topk_idx: int, envelope: int | None = None) -> None:
        """A well-formed flag for the next round of ``to``, with contents of our choice."""
        shape = self.buffer.shape
        layout = native.RegionLayout()
        native.check(native.load(), native.load().eep_region_layout_compute(shape, layout))
        base = self.buffer.table.peers[to].region
        slot = self.buffer.table.peers[self.buffer.rank].slot
        first = layout.topk_idx + slot * shape.max_tokens * shape.max_topk * 4
        ctypes.c_int32.from_address(base + first).value = topk_idx
        mailbox = Mailbox.from_address(base + slot * ctypes.sizeof(Mailbox))
        mailbox.envelope = shape.hidden << 32 | shape.max_topk << 8 | shape.wire_type if envelope is None else envelope
        mailbox.dispatch_flag = self.buffer.view.epoch << 40 | 1 << 16 | count

    def close(self) -> None:
        self.buffer.close()

    def memories(self) -> tuple[int, int]:
        """How many descriptors and mappings of ranks' memory this process holds, once it has finished unmapping."""
        for thread in threading.enumerate():
            if thread.name.startswith("eep-unmap"):
                thread.join(PATIENCE_S)
        descriptors = 0
        for fd in os.listdir("/proc/self/fd"):
            try:
                descriptors += "memfd:eep-" in os.readlink(f"/proc/self/fd/{fd}")
            except FileNotFoundError:
                pass  # the one that listed the directory
        return descriptors, mapped_memories(os.getpid())


def mapped_memories(pid: int) -> int:
    """How many mappings of ranks' memory a process has."""
    with open(f"/proc/{pid}/maps") as maps:
        return sum("memfd:eep-" in line for line in maps)
