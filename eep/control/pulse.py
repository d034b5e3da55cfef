"""The pulse of a process: a word of shared memory that the kernel marks at the moment the process is killed.

A pidfd tells of an exit only when the kernel has taken the process apart. That takes 20 ms for a process that has merely
imported torch, and far longer for one that holds a GPU. But a dying thread first lets go of its robust futexes: the kernel
marks them "owner died" and wakes their waiters, before it unmaps any memory. So each rank has a thread that only holds such
a lock, in a page that it shares with its supervisor, and the supervisor waits on the lock.

The supervisor only ever reads the page, in which the rank also keeps its progress word. The pidfd stays the proof of the
exit; the pulse is what makes it quick.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import platform
import threading
from collections.abc import Callable
from contextlib import suppress

from eep.control.progress_word import ProgressWord
from eep.data_plane.memory.shm import SharedMemory
from eep.errors import PeerUnreachable

PULSE_BYTES = mmap.PAGESIZE
_FUTEX_SYSCALL = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT = 0
_WAITERS, _OWNER_DIED = 0x80000000, 0x40000000
_SHARED, _ROBUST = 1, 1
_MUTEX_BYTES = 64
"""At least sizeof(pthread_mutex_t) and sizeof(pthread_mutexattr_t) on every platform of glibc."""
_LOOKS_EVERY_S = 5

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_supported() -> bool:
    return platform.machine() in _FUTEX_SYSCALL and platform.libc_ver()[0] == "glibc"


class Pulse:
    """The rank's side: from now on, until this process dies, its pulse can be felt through :attr:`descriptor`."""

    def __init__(self) -> None:
        memory = SharedMemory.create("eep-pulse", PULSE_BYTES)
        self.descriptor, self._page = memory.fd, memory.map
        self.progress = ProgressWord(memory.map)
        self.progress.own()
        beating = threading.Event()
        threading.Thread(target=self._beat, args=(beating,), name="eep-pulse", daemon=True).start()
        if not beating.wait(timeout=10):
            raise RuntimeError("this process could not take the lock that marks it as alive")

    def _beat(self, beating: threading.Event) -> None:
        attributes = ctypes.create_string_buffer(_MUTEX_BYTES)
        lock = (ctypes.c_char * _MUTEX_BYTES).from_buffer(self._page)
        failed = (
            _libc.pthread_mutexattr_init(attributes)
            or _libc.pthread_mutexattr_setpshared(attributes, _SHARED)
            or _libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
            or _libc.pthread_mutex_init(lock, attributes)
            or _libc.pthread_mutex_lock(lock)
        )
        if failed:
            return
        # The first word of the lock holds its owner. The kernel wakes waiters only if the word says that there are
        # some. Say so here, where no other process can write yet, so that the supervisor need not.
        word = ctypes.c_uint32.from_buffer(self._page)
        word.value |= _WAITERS
        beating.set()
        threading.Event().wait()  # for ever: only the end of the process ends this thread


class PulseWatch:
    """The supervisor's side: calls ``stopped`` once, in the event loop in which it is made, when the pulse stops."""

    def __init__(self, descriptor: int, stopped: Callable[[], None]) -> None:
        """Takes ``descriptor`` over. Raises ValueError if it is no pulse."""
        try:
            # Sealed, or its owner could shrink it under us and end the supervisor with a SIGBUS.
            memory = SharedMemory.adopt(descriptor, PULSE_BYTES)
        except PeerUnreachable as error:
            raise ValueError(f"a pulse is a sealed page of {PULSE_BYTES} bytes: {error}") from error
        self._page = memory.map
        memory.close()  # the mapping stays for as long as we look at it
        self._word = ctypes.c_uint32.from_buffer(self._page)
        self.progress = ProgressWord(self._page)
        self._stopped = stopped
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._feel, name="eep-pulse-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell nothing from now on, even if the pulse has stopped."""
        self._closed = True

    def _tell(self) -> None:
        if (
            not self._closed
        ):  # else the exit was known before: on a busy machine the pidfd may be faster than this thread
            self._stopped()

    def _feel(self) -> None:
        address = ctypes.addressof(self._word)
        # Woken by the kernel; looks by itself now and then only to notice that it was closed.
        patience = _Timespec(_LOOKS_EVERY_S, 0)
        while not self._closed:
            value = self._word.value
            if value & _OWNER_DIED:
                with suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._tell)
                return
            if not value & _WAITERS:
                return  # no process holds this lock: only the pidfd can tell
            _libc.syscall(
                ctypes.c_long(_FUTEX_SYSCALL[platform.machine()]),
                ctypes.c_void_p(address),
                ctypes.c_long(_FUTEX_WAIT),
                ctypes.c_uint32(value),
                ctypes.byref(patience),
                None,
                ctypes.c_long(0),
            )
