"""Rank programs for tests. Each is run in a process of its own by a real supervisor."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from eep.control.member import Member
from eep.view import View


def steady() -> None:
    """Takes part until it is told otherwise."""
    member = Member.connect()
    member.ready()
    while member.boundary() is not None:
        time.sleep(0.002)


def hangs() -> None:
    """Rank 1 stops getting on in its first life, in one of several ways; the others take part."""
    member = Member.connect()
    member.ready()
    if member.boundary() is not None and member.rank == 1 and member.incarnation == 0:
        member.may_take_long(os.environ["EEP_TEST_HANG"] != "spins")
        member.run()
        match os.environ["EEP_TEST_HANG"]:
            case "sleeps":
                time.sleep(3600)
            case "locks itself out":
                lock = threading.Lock()
                with lock, lock:
                    pass
            case "computes" | "spins":
                while True:
                    pass
            case "waits for a thread that computes":
                threading.Thread(target=_compute, daemon=True).start()
                threading.Event().wait()
            case "waits for a program":
                subprocess.run(["sleep", "3600"], check=False)
            case "waits for a thread that waits for a program":
                threading.Thread(target=lambda: subprocess.run(["sleep", "3600"], check=False), daemon=True).start()
                threading.Event().wait()
            case "writes to nobody":
                os.write(os.pipe()[1], b"x" * (16 << 20))
            case "may wait":
                member.advance()
                time.sleep(3600)
    while member.boundary() is not None:
        time.sleep(0.002)


def _compute() -> None:
    while True:
        pass


def brings_in_experts() -> None:
    """Says in every view that it has brought in two experts."""
    member = Member.connect()
    member.ready()
    while member.boundary(lambda view: member.note_repair(2, {"peer": 64})) is not None:
        time.sleep(0.002)


def steady_if_it_knows() -> None:
    """Ends at once if a variable that the supervisor's process set late has not reached it."""
    if os.environ.get("EEP_TEST_SET_LATER") == "known":
        steady()


def titled() -> None:
    """Writes over its environment, as a process does that gives itself a long title."""
    start, end = (int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    ctypes.memset(start, 0, end - start)
    steady()


def crash_at_start() -> None:
    os._exit(3)


def stops_as_it_starts() -> None:
    """Rank 1 stops itself in its first life before the supervisor has heard of it; the others take part."""
    if (os.environ["EEP_RANK"], os.environ["EEP_INCARNATION"]) == ("1", "0"):
        os.kill(os.getpid(), signal.SIGSTOP)
    steady()


def locks_itself_out_as_it_starts() -> None:
    """Rank 1 waits in its first life for a lock that it holds itself; the others take part."""
    if (os.environ["EEP_RANK"], os.environ["EEP_INCARNATION"]) == ("1", "0"):
        lock = threading.Lock()
        with lock, lock:
            pass
    steady()


def hangs_in_repair() -> None:
    """Rank 1 sleeps in the first repair of its first life; the others take part."""
    member = Member.connect()
    member.ready()

    def repair(view: View) -> None:
        if (member.rank, member.incarnation) == (1, 0):
            time.sleep(3600)

    while member.boundary(repair) is not None:
        time.sleep(0.002)


def never_ready() -> None:
    Member.connect()
    time.sleep(3600)


def finishes() -> None:
    """Takes part once, and returns."""
    member = Member.connect()
    member.ready()
    member.boundary()


def leaves() -> None:
    """Rank 1 asks to leave as soon as it is in; the others stay."""
    member = Member.connect()
    member.ready()
    if member.boundary() is not None and member.rank == 1:
        member.leave()
    while member.boundary() is not None:
        time.sleep(0.002)


def fails() -> None:
    """The first life of rank 1 says that an exception ends it, and hangs instead of ending. The others stay."""
    member = Member.connect()
    member.ready()
    if member.boundary() is not None and (member.rank, member.incarnation) == (1, 0):
        member.fail("IndexError: 7")
        time.sleep(3600)
    while member.boundary() is not None:
        time.sleep(0.002)


def suspects_a_stopped_peer() -> None:
    """Every rank accuses a peer that is stopped, as its kernels would when it keeps them waiting."""
    member = Member.connect()
    member.ready()
    told = -1
    while (view := member.boundary()) is not None:
        stopped = [rank for rank in view.active if rank != member.rank and is_stopped(rank)]
        if stopped and told < view.epoch:
            told = view.epoch
            member.suspect(stopped, "it is stopped")
        time.sleep(0.002)


def waits_for_another_view() -> None:
    """Has nothing to do in the first view that it is in."""
    member = Member.connect()
    member.ready()
    view = member.boundary()
    assert view is not None
    member.wait_for_view(after=view.epoch)


def is_stopped(rank: int) -> bool:
    path = os.path.join(os.environ["EEP_CONTROL_DIR"], f"pid-{rank}")
    try:
        with open(path) as file, open(f"/proc/{file.read()}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def with_a_child() -> None:
    """Starts a process of its own, which knows nothing of EEP."""
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])
    steady()


def slow_repair() -> None:
    """Repairs until a file says that it may go on."""
    member = Member.connect()
    member.ready()
    gate = os.path.join(os.environ["EEP_CONTROL_DIR"], "closed")

    def repair(view: object) -> None:
        while os.path.exists(gate) and member.removed is None:
            time.sleep(0.002)

    while member.boundary(repair) is not None:
        time.sleep(0.002)


class Recorder:
    """A data plane that writes down what it is told."""

    control_fds = ()
    device_files: tuple[int, ...] = ()

    def __init__(self) -> None:
        name = f"told-{os.environ['EEP_RANK']}-{os.environ['EEP_INCARNATION']}"
        self._path = Path(os.environ["EEP_CONTROL_DIR"]) / name

    def revoke(self, epoch: int) -> None:
        self.note(f"revoke {epoch}")

    def apply(self, view: View) -> bool:
        self.note(f"apply {view.epoch}")
        return True

    def note(self, text: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{text}\n")


def records() -> None:
    """Writes down what its data plane is told, and how it ends."""
    recorder = Recorder()
    member = Member.connect(recorder)
    member.ready()
    while member.boundary() is not None:
        time.sleep(0.002)
    recorder.note(f"ended: {member.removed}")


def has_a_device_file() -> None:
    """What stands for a file of the GPU's driver is locked for as long as any process has it open."""
    name = f"device-{os.environ['EEP_RANK']}-{os.environ['EEP_INCARNATION']}"
    with open(os.path.join(os.environ["EEP_CONTROL_DIR"], name), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        recorder = Recorder()
        recorder.device_files = (file.fileno(),)
        member = Member.connect(recorder)
        member.ready()
        while member.boundary() is not None:
            time.sleep(0.002)


def signals_its_parent() -> None:
    """Rank 1 does what some engines do when they fail: it signals its parent, and ends."""
    if os.environ["EEP_RANK"] == "1":
        os.kill(os.getppid(), signal.SIGQUIT)
        os._exit(1)
    steady()


def tells_what_collections_leave_out(path: str) -> None:
    """How many objects Python's garbage collector does not visit."""
    Path(path).write_text(str(gc.get_freeze_count()))


def tells_what_it_was_given(path: str) -> None:
    """Writes down who it is, and returns."""
    member = Member.connect()
    stdin = os.readlink("/proc/self/fd/0")
    Path(path).write_text(f"{member.rank} {member.incarnation} {os.environ['EEP_CONTROL_DIR']} {stdin}")


def cannot_connect() -> None:
    raise ConnectionRefusedError("no peer is there")


def leaves_a_mark(directory: str) -> None:
    """Shows that it ran, and as whom."""
    Path(directory, f"ran-{os.environ['EEP_RANK']}").write_text(str(os.getpid()))


def sleeps() -> None:
    """Takes part in nothing, and says so if it is told where."""
    if (path := os.environ.get("EEP_TEST_SLEEPS")) is not None:
        Path(path).touch()
    time.sleep(3600)


def notes_whom_it_is_for() -> None:
    """What a spare calls when it has imported everything: writes down for whom it is prepared."""
    path = Path(os.environ["EEP_CONTROL_DIR"]) / f"for-{os.getpid()}"
    path.write_text(os.environ["EEP_SPARE_FOR"])


def waits_for_its_order() -> None:
    """What prepares a spare and is the rank itself: it gets its order in the middle."""
    from eep.control.launch import spare_order

    spare_order.await_order()
    if (path := os.environ.get("EEP_TEST_TOLD")) is not None:
        Path(path).write_text("it was its own")


def steady_once_it_is_told() -> None:
    """The same, as a rank that takes part."""
    from eep.control.launch import spare_order

    notes_whom_it_is_for()
    spare_order.await_order()
    steady()
