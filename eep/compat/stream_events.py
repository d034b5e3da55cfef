"""DeepEP's events and streams. On a CPU a call is over when it returns, so there an event is nothing to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch


class EventHandle:
    """What the current stream has been given so far."""

    def __init__(self, device: torch.device | None = None) -> None:
        """``device``: the one whose stream is meant, by default the current GPU if there is one."""
        uses_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
        self._event = torch.cuda.current_stream(device).record_event() if uses_gpu else None

    def current_stream_wait(self) -> None:
        """What the current stream is given from now on runs after the event."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """An event, and what is to stay alive until it. ``with event:`` waits for it when the block ends."""

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor | None, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._after_wait: Callable[[], Any] | None = None
        self._releases = False

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Returns what the hook returns that was registered to follow the wait, if there is one."""
        if self.event is None:
            raise ValueError("this EventOverlap has no event; take one from a call, or from Buffer.capture()")
        self.event.current_stream_wait()
        hook, self._after_wait = self._after_wait, None
        if release_handle:
            self.event = None
        return None if hook is None else hook()

    def wait(self) -> Any:
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """The next wait calls this once."""
        if self._after_wait is not None:
            raise ValueError("this EventOverlap has a hook already; wait before you register another")
        self._after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> Self:
        """``with event(release_handle=True):`` also lets go of the event."""
        self._releases = release_handle
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        releases, self._releases = self._releases, False
        if self.event is not None:
            self.current_stream_wait(release_handle=releases)


def after(device: torch.device, *tensors: torch.Tensor | None) -> EventOverlap:
    """The event after a call on ``device``, which keeps ``tensors`` alive."""
    return EventOverlap(EventHandle(device), tensors or None)


def wait_for(event: EventOverlap | EventHandle | None) -> None:
    """Lets the current stream wait for the event that a caller gave, if it gave one."""
    handle = event.event if isinstance(event, EventOverlap) else event
    if handle is not None:
        handle.current_stream_wait()


def current_stream() -> torch.cuda.Stream | torch.cpu.Stream:
    """The stream on which calls run: the current one. A CPU has one that does nothing."""
    return torch.cuda.current_stream() if torch.cuda.is_available() else torch.cpu.current_stream()
