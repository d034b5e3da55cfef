"""What a running server occupies: files, descriptors, memory, shared memory, and the time of a scrape.

Read from outside, from /proc and from the directories that the server was given for itself.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

from eep.control.wire.client import ask_supervisor
from eep.control.wire.messages import AskStatus
from eep.drill.sglang_server import Server, shared_memory_of
from eep.observe.event_log import older

_SCRAPES = 5


class Places:
    """The directories of a server that only it writes to."""

    def __init__(self, root: Path) -> None:
        self.private, self.metrics, self.temporary = root / "d", root / "metrics", root / "tmp"
        for each in (self.metrics, self.temporary):
            each.mkdir()

    def environment(self) -> dict[str, str]:
        """For the server. SGLang 0.5.21 waits in the end for requests that it keeps a state of, unless it is forced."""
        return {
            "PROMETHEUS_MULTIPROC_DIR": str(self.metrics),
            "TMPDIR": str(self.temporary),
            "SGL_FORCE_SHUTDOWN": "1",
        }


def measure(server: Server, places: Places) -> dict[str, float]:
    """One look at everything, by name."""
    return {**_files(places), **_processes(server, places.private), **_scrape(server)}


def _files(places: Places) -> dict[str, float]:
    private = [path for path in places.private.rglob("*") if not path.is_dir()]
    log = places.private / "events.jsonl"
    return {
        "files: private directory": len(private),
        "files: sockets": sum(path.is_socket() for path in private),
        "files: held": sum(path.parent.name == "held" for path in private),
        "files: metrics": _count(places.metrics),
        "files: temporary": _count(places.temporary),
        "bytes: private directory without the event log": sum(
            _size(path) for path in private if path not in (log, older(log))
        ),
        "bytes: metrics": sum(_size(path) for path in places.metrics.rglob("*")),
        "bytes: event log": _size(log) + _size(older(log)),
    }


def _processes(server: Server, directory: Path) -> dict[str, float]:
    status = json.loads(ask_supervisor(directory, AskStatus()).body)
    ranks = {rank["pid"] for rank in status["ranks"].values()}
    sums: dict[str, float] = defaultdict(float)
    shared: set[Path] = set()
    for pid in server.processes():
        role = {server.pid: "main", status["pid"]: "controller"}.get(pid) or ("ranks" if pid in ranks else _role(pid))
        try:
            memory = _memory(pid)
            counted = {"descriptors": _count(Path(f"/proc/{pid}/fd")), "threads": _count(Path(f"/proc/{pid}/task"))}
            shared |= shared_memory_of(pid)
        except OSError:  # it has ended since
            continue
        sums["processes: all"] += 1
        for name, value in {**counted, **memory}.items():
            sums[f"{name}: {role}"] += value
    sums["shared memory: files"] = len(shared)
    sums["shared memory: bytes"] = sum(_size(path) for path in shared)
    return dict(sums)


def _role(pid: int) -> str:
    """What a process says that it is: its title, or the module that it runs."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
    for word in words:
        if "detoken" in word.lower():
            return "detokenizer"
        if "keeper" in word:
            return "keeper"
        if "fork_server" in word or "fork-server" in word:
            return "fork servers"
    return "others"


def _memory(pid: int) -> dict[str, float]:
    """In MiB: *pss* shares out the pages that several processes have, *uss* leaves them out."""
    found: dict[str, float] = defaultdict(float)
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        found[name] = int(value.split()[0]) / 1024
    return {"pss MiB": found["Pss"], "uss MiB": found["Private_Clean"] + found["Private_Dirty"]}


def _scrape(server: Server) -> dict[str, float]:
    times, size = [], 0
    for _ in range(_SCRAPES):
        began = time.perf_counter()
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
            size = len(answer.read())
        times.append(1000 * (time.perf_counter() - began))
    # The fastest, since ranks and clients keep the cores busy: what a scrape costs, rather than what it waits for.
    return {"scrape: fastest ms": min(times), "scrape: median ms": statistics.median(times), "scrape: bytes": size}


def _count(directory: Path) -> int:
    return len(os.listdir(directory))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
