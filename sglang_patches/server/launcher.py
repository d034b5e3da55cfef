"""How the processes of the server are started.

Two things go wrong when SGLang starts a child by ``spawn``. Importing SGLang takes longer than everything else that a rank
does before it serves. And the child imports SGLang to find its function before any plugin is loaded. So each child runs a
:class:`ChildProcess`, which loads the plugin first. Children are forked from a **fork server** that has imported everything
and has opened no GPU (:mod:`sglang_patches.cuda.unopened_devices`).
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import secrets
import signal
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from typing import Any

from sglang_patches import cpu, hooks, installation, options, progress_bars
from sglang_patches.cpu import sinks

_PRELOAD = "sglang_patches.server.preload"
FORKED = "EEP_FORKED"
"""A variable of every process that is forked from the fork server. By it the keeper finds the ranks among them."""
FORKS_ON_GPU = "EEP_FORK_ON_GPU"
"""``0`` in this variable: on a machine with a GPU each process imports for itself."""
_TITLES_SPARE_ENVIRONMENT = "SPT_NOENV"
"""SGLang's processes give themselves titles, which would be written over the variables by which the keeper finds them."""
_SET_PARENT_DEATH_SIGNAL = 1


class ChildProcess:
    """A function of SGLang as the target of a process, which has its parent's environment and loads the plugin first.

    It is pickled as names and strings. ``extra`` are variables for this child alone.
    """

    def __init__(
        self,
        module: str,
        name: str,
        environment: Mapping[str, str] | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self._module, self._name = module, name
        self._environment = environment
        self._extra = dict(extra or {})

    @classmethod
    def of(cls, function: Callable[..., Any]) -> ChildProcess:
        return function if isinstance(function, ChildProcess) else cls(function.__module__, function.__qualname__)

    def having(self, extra: Mapping[str, str]) -> ChildProcess:
        """The same with variables of its own."""
        return ChildProcess(self._module, self._name, extra={**self._extra, **extra})

    def __reduce__(self) -> tuple[Any, ...]:
        # A child of the fork server has the fork server's environment, which may be older than ours.
        return ChildProcess, (self._module, self._name, dict(os.environ), self._extra)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._environment is not None:
            os.environ.clear()
            os.environ.update(self._environment)
        os.environ.update(self._extra)
        _keep_fork_server()
        become_child()
        return getattr(importlib.import_module(self._module), self._name)(*arguments, **named)


_is_child = False


def is_child() -> bool:
    """Whether a server started this process."""
    return _is_child


def become_child() -> None:
    """Prepare this process to run a part of a server."""
    global _is_child
    _is_child = True
    progress_bars.leave_no_lock()
    if cpu.is_asked_for():
        cpu.fill_gaps()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # SGLang loads plugins once. In a process that was forked from a prepared one, that was before the options were known.
    if options.current() is not None:
        installation.install_all()
    elif cpu.is_asked_for():
        installation.install_model_paths()


def prepare_cpu() -> None:
    """Prepare a server without ``--ep-backend eep`` on a machine without a GPU."""
    cpu.fill_gaps()
    start_fork_server()
    register()
    sinks.allow()
    hooks.apply()


def start_fork_server() -> None:
    """Let the fork server import SGLang while this process does the same. Does nothing if it runs already."""
    if forkserver._forkserver._forkserver_pid is None:  # type: ignore[attr-defined]
        os.environ[FORKED] = secrets.token_hex(16)
    multiprocessing.set_forkserver_preload([_PRELOAD])
    forkserver.ensure_running()


def _keep_fork_server() -> None:
    """Let a child of the fork server start its own children there: a second fork server would have to import again."""
    server: Any = forkserver._forkserver
    if server._forkserver_address is not None and server._forkserver_pid is None:  # this process was forked from it
        server.ensure_running = lambda: None


def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def register() -> None:
    hooks.hook("entrypoints.engine._set_envs_and_config", _choose_start_method, "after")
    hooks.hook("entrypoints.engine.Engine._launch_subprocesses", _launch_subprocesses)
    hooks.hook("entrypoints.engine.Engine._launch_scheduler_processes", _launch_scheduler_processes)
    from sglang.srt.entrypoints import engine

    hooks.rebind(
        "entrypoints.engine.run_data_parallel_controller_process",
        ChildProcess.of(engine.run_data_parallel_controller_process),
    )


def _choose_start_method(_: None, server_args: Any) -> None:
    if FORKED in os.environ:
        multiprocessing.set_start_method("forkserver", force=True)


def _launch_subprocesses(original: Callable[..., Any], cls: type, *arguments: Any, **named: Any) -> Any:
    os.environ.setdefault(_TITLES_SPARE_ENVIRONMENT, "1")
    for each in ("run_scheduler_process_func", "run_detokenizer_process_func"):
        if each in named:
            named[each] = ChildProcess.of(named[each])
    return original(cls, *arguments, **named)


def _launch_scheduler_processes(original: Callable[..., Any], cls: type, *arguments: Any, **named: Any) -> Any:
    """From version 0.5.22 on the main process starts the schedulers, and ends the server when one dies. With an elastic
    backend the controller starts them, as in older versions."""
    if options.current() is None:
        return original(cls, *arguments, **named)
    from sglang.srt.runtime_context import get_exec

    with get_exec().moe.override(elastic_ep_backend="eep"):
        return original(cls, *arguments, **named)
