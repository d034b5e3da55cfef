"""The sockets between the processes of a server: Unix sockets in its private directory.

With DP attention SGLang has its processes talk over TCP on this host, and they unpickle what comes: every local user could
run code as the server. Here each of these sockets has a path in a directory that no other user can enter. The paths follow
from the directory and the rank alone, so every process knows them, and a rank that is launched later too.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from eep.access import check_socket_path, make_private
from sglang_patches import hooks, options

_CONTROLLER = "managers.data_parallel_controller.DataParallelController."
_FIXED = {
    "tokenizer_ipc_name": "tokenizer",
    "scheduler_input_ipc_name": "controller",
    "detokenizer_ipc_name": "detokenizer",
    "rpc_ipc_name": "rpc",
    "metrics_ipc_name": "metrics",
    "load_collector_ipc_name": "loads",
}
"""The fields of SGLang's ``PortArgs`` that are addresses, and the names of their sockets."""


def register() -> None:
    hooks.hook("server_args.PortArgs.init_new", _name_sockets, "replace")
    hooks.hook(_CONTROLLER + "launch_dp_attention_schedulers", _bind_rank_sockets, "replace")


def check_paths(directory: Path, max_ranks: int) -> None:
    """ValueError if a path in the server's directory is too long for a socket."""
    for address in (*addresses(directory, None).values(), rank_address(directory, max_ranks - 1)):
        check_socket_path(address.removeprefix("ipc://"))


def prepare(directory: Path) -> Path:
    """Make the place of the sockets in the server's directory."""
    return make_private(_place(directory))


def addresses(directory: Path, rank: int | None) -> dict[str, str]:
    """The addresses by which a process talks to the others, as fields of ``PortArgs``. A ``rank`` gets its requests at a
    socket of its own; None is a process that is no rank."""
    found = {field: f"ipc://{_place(directory) / name}" for field, name in _FIXED.items()}
    return found if rank is None else {**found, "scheduler_input_ipc_name": rank_address(directory, rank)}


def rank_address(directory: Path, rank: int) -> str:
    """Where the controller sends the requests of a rank. The controller binds it, so it stays when the rank dies."""
    return f"ipc://{_place(directory) / f'rank-{rank}'}"


def _place(directory: Path) -> Path:
    return directory / "sockets"


def _server_directory() -> Path:
    return Path(os.environ[options.DIRECTORY])


def _name_sockets(server_args: Any, dp_rank: int | None = None, worker_ports: list[int] | None = None) -> Any:
    from sglang.srt.server_args import PortArgs

    instance = uuid.uuid4().hex[:12]
    if dp_rank is None:  # a rank gets the name of the server
        _list_for_sweep(f"/dev/shm/sglang_loads_{instance}_*.shm")
    return PortArgs(
        **addresses(_server_directory(), dp_rank),
        # No process listens there: the store of a rank's process groups is in its own memory.
        nccl_port=server_args.nccl_port or 0,
        tokenizer_worker_ipc_name=None,
        decoupled_spec_ipc_config=None,
        instance_id=instance,
    )


def _list_for_sweep(pattern: str) -> None:
    """List files of SGLang in shared memory, for the keeper to remove them at the end: SGLang leaves them there. No rank has
    been started yet, so they are listed before there are any."""
    with (_server_directory() / "sweep").open("a") as file:
        file.write(f"{pattern}\n")


def _bind_rank_sockets(controller: Any, server_args: Any, port_args: Any) -> None:
    """For every rank that there may ever be. SGLang would bind a TCP port for each, and one more to tell other hosts."""
    import zmq
    from sglang.srt.utils.network import get_zmq_socket

    ranks = range(options.required().max_ranks)
    for rank in ranks:
        address = rank_address(_server_directory(), rank)
        controller.workers[rank] = get_zmq_socket(controller.context, zmq.PUSH, address, True)
    controller.launch_tensor_parallel_group(server_args, port_args, 0, None, list(ranks))
