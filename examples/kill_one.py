"""Ranks exchange tokens; one is killed with SIGKILL; the survivors go on; a replacement joins; all go on.

This process is a tiny supervisor: it starts the ranks, watches them with pidfds, and tells them when to
change their view (kill_one_rank.py is a rank). It prints what happened and when, as measured in this run.
The exit code is 0 only if no rank accepted a wrong value and no peer table or buffer has moved.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Collection, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from kill_one_rank import EXPERTS_PER_RANK, PATIENCE_S, TOKENS, Seat, run_rank

from eep import Rendezvous

ALL, ONE_LOST, REJOINED = 1, 2, 3
"""The epochs of the three acts."""

Story = dict[str, Any]


class DemoError(RuntimeError):
    """The demonstration did not go as it must."""


class RankProcess:
    """A rank as its supervisor sees it: a process, a pidfd that tells of its end, and a pipe."""

    def __init__(self, seat: Seat) -> None:
        # The fork server imports torch once, for all ranks and for the joiner.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["eep.data_plane.buffer"])
        self.rank = seat.rank
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=run_rank, args=(seat, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.pidfd = os.pidfd_open(self.process.pid)

    def tell(self, *order: Any) -> None:
        self.pipe.send(order)

    def expect(self, what: str, value: Any = None) -> tuple[int, Any]:
        """Waits for the next message of a kind (and with that value, if one is given); returns its time and value."""
        for kind, moment, said in self._messages():
            if kind == what and value in (None, said):
                return moment, said
        raise DemoError(f"rank {self.rank} did not say {what!r} within {PATIENCE_S:.0f} s")

    def messages_until(self, what: str, value: Any) -> list[tuple[str, int, Any]]:
        """Waits for one message; returns all messages up to it, itself included."""
        heard = []
        for message in self._messages():
            heard.append(message)
            if (message[0], message[2]) == (what, value):
                return heard
        raise DemoError(f"rank {self.rank} did not say {what!r} within {PATIENCE_S:.0f} s")

    def wait_for_end(self) -> int:
        """Waits until the process is dead; returns when it saw that."""
        if not select.select([self.pidfd], [], [], PATIENCE_S)[0]:
            raise DemoError(f"rank {self.rank} did not end within {PATIENCE_S:.0f} s")
        return time.monotonic_ns()

    def close(self) -> None:
        """Ends the process, whatever state it is in."""
        self.pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        os.close(self.pidfd)

    def _messages(self) -> Iterator[tuple[str, int, Any]]:
        deadline = time.monotonic() + PATIENCE_S
        while self.pipe.poll(max(0.0, deadline - time.monotonic())):
            try:
                message = self.pipe.recv()
            except EOFError:
                raise DemoError(f"rank {self.rank} died, though this program did not kill it") from None
            if message[0] == "error":
                raise DemoError(f"rank {self.rank} failed:\n{message[2]}")
            yield message


class Timeline:
    """Lines with the milliseconds since the ranks were connected; in colour on a terminal."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._zero = 0

    def begin(self) -> None:
        self._zero = time.monotonic_ns()

    def tell(self, moment_ns: int, text: str, colour: str = "") -> None:
        self.say(f"{(moment_ns - self._zero) / 1e6:9.1f} ms  {self._paint(text, colour)}")

    def say(self, text: str = "", colour: str = "") -> None:
        if not self._silent:
            print(self._paint(text, colour), flush=True)

    def _paint(self, text: str, colour: str) -> str:
        codes = {"red": "31", "green": "32", "bold": "1", "dim": "2"}
        return f"\033[{codes[colour]}m{text}\033[0m" if colour and self._colours else text


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="how many processes, 2 to 16 (default: 4)")
    parser.add_argument("--kill-rank", type=int, default=2, help="which of them dies (default: 2)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of each of the three acts (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON instead of the timeline")
    arguments = parser.parse_args()
    if not 2 <= arguments.ranks <= 16:
        parser.error("--ranks must be between 2 and 16")
    if not 0 <= arguments.kill_rank < arguments.ranks:
        parser.error(f"--kill-rank must be between 0 and {arguments.ranks - 1}")
    if not 0 < arguments.seconds <= 60:
        parser.error("--seconds must be positive and at most 60")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    timeline = Timeline(silent=arguments.json)
    try:
        story = play(arguments.ranks, arguments.kill_rank, arguments.seconds, timeline)
    except DemoError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if arguments.json:
        print(json.dumps(story, indent=1))
    else:
        print_ending(story, timeline)
    return 0 if story["accepted_wrong"] == 0 and story["addresses_kept"] else 1


def play(ranks: int, killed: int, seconds: float, timeline: Timeline) -> Story:
    """Plays all three acts. Returns the facts."""
    names = ", ".join(str(rank) for rank in range(ranks) if rank != killed)
    with contextlib.ExitStack() as stack:
        rendezvous = stack.enter_context(Rendezvous.temporary())

        def start(rank: int, joins: bool) -> RankProcess:
            process = RankProcess(Seat(rank, ranks, str(rendezvous.path), joins))
            stack.callback(process.close)
            return process

        timeline.say(f"Starting {ranks} processes (importing torch takes most of it) ...", "dim")
        members = {rank: start(rank, joins=False) for rank in range(ranks)}
        for member in members.values():
            member.expect("connected")
        timeline.begin()
        experts = EXPERTS_PER_RANK * ranks
        timeline.tell(
            time.monotonic_ns(),
            f"{ranks} ranks exchange tokens: {experts} experts, each on two ranks",
            "bold",
        )
        for member in members.values():
            member.expect("good", ALL)
        time.sleep(seconds)

        victim = members.pop(killed)
        struck = time.monotonic_ns()
        os.kill(victim.process.pid, signal.SIGKILL)
        times = drop(victim, members.values(), struck)
        timeline.tell(struck, f"SIGKILL to rank {killed}, which is in the middle of its work", "red")
        timeline.tell(times["seen"], f"the supervisor sees that it is gone ({_after(struck, times['seen'])})")
        timeline.tell(times["left"], f"the last survivor has left its wait ({_after(struck, times['left'])})")
        timeline.tell(
            times["good"],
            f"first good step of ranks {names} alone ({_after(struck, times['good'])})",
            "green",
        )
        time.sleep(seconds)

        launched = time.monotonic_ns()
        joiner = start(killed, joins=True)
        here, incarnation = joiner.expect("here")
        admitted = admit(joiner, incarnation, members.values())
        joined, _ = joiner.expect("good", REJOINED)
        members[killed] = joiner
        timeline.tell(launched, f"the supervisor starts a new process to take the place of rank {killed}", "bold")
        timeline.tell(here, f"it has rank {killed} as incarnation {incarnation}; the survivors work on meanwhile")
        timeline.tell(admitted, "the supervisor tells the survivors to admit it between two steps")
        timeline.tell(joined, f"first good step of the joiner ({_after(launched, joined)} after its start)", "green")
        time.sleep(seconds)

        summaries = finish(members)
        timeline.tell(time.monotonic_ns(), "all ranks are done", "bold")
    return {
        "ranks": ranks,
        "killed": killed,
        "milliseconds_after_sigkill": {name: (moment - struck) / 1e6 for name, moment in times.items()},
        "milliseconds_from_launch_to_first_step": (joined - launched) / 1e6,
        "accepted": {rank: summary["accepted"] for rank, summary in summaries.items()},
        "accepted_wrong": sum(summary["accepted_wrong"] for summary in summaries.values()),
        "rejected": sum(summary["rejected"] for summary in summaries.values()),
        "rejected_wrong": sum(summary["rejected_wrong"] for summary in summaries.values()),
        "incarnations": {rank: summary["incarnation"] for rank, summary in summaries.items()},
        "addresses_kept": all(summary["addresses"] == 1 for summary in summaries.values()),
    }


def drop(victim: RankProcess, survivors: Collection[RankProcess], struck: int) -> dict[str, int]:
    """Sees the death and has the survivors go on. Returns when it saw that, when waits ended, when work went on."""
    seen = victim.wait_for_end()
    for survivor in survivors:
        survivor.tell("drop", victim.rank, ONE_LOST)
    heard = [message for survivor in survivors for message in survivor.messages_until("good", ONE_LOST)]
    # A survivor that was between two steps had no wait to leave: for it, the revoke came before the wait.
    left = [moment for kind, moment, _ in heard if kind == "left" and moment > struck]
    return {
        "seen": seen,
        "left": max(left, default=seen),
        "good": min(moment for kind, moment, _ in heard if kind == "good"),
    }


def admit(joiner: RankProcess, incarnation: int, members: Collection[RankProcess]) -> int:
    """Has the members admit a joiner, all between the same two steps. Returns when it told them."""
    boundary = hold(members)
    told = time.monotonic_ns()
    for member in members:
        member.tell("admit", joiner.rank, incarnation, REJOINED, boundary)
    joiner.expect("connected", REJOINED)
    return told


def finish(members: dict[int, RankProcess]) -> dict[int, dict[str, Any]]:
    """Ends all ranks after the same step. Returns the summary of each."""
    boundary = hold(members.values())
    for member in members.values():
        member.tell("finish", boundary)
    summaries = {rank: members[rank].expect("summary")[1] for rank in sorted(members)}
    for member in members.values():
        member.wait_for_end()
        member.process.join(PATIENCE_S)
        if member.process.exitcode:
            raise DemoError(f"rank {member.rank} ended with code {member.process.exitcode}")
    return summaries


def hold(members: Collection[RankProcess]) -> int:
    """Lets no rank begin another step; returns the number of steps that every rank can still complete."""
    for member in members:
        member.tell("hold")
    return max(member.expect("begun")[1] for member in members)


def print_ending(story: Story, timeline: Timeline) -> None:
    """Prints the good steps of each rank, and whether all values were right."""
    timeline.say()
    timeline.say(f"  {'rank':<22} {'all':>8} {'one lost':>10} {'rejoined':>10}   good steps of {TOKENS} tokens", "dim")
    for rank, accepted in story["accepted"].items():
        life = story["incarnations"][rank]
        name = f"{rank} (incarnation {life})" if life else str(rank)
        counts = [accepted.get(epoch) for epoch in (ALL, ONE_LOST, REJOINED)]
        cells = [
            f"{'-' if count is None else count:>{width}}" for count, width in zip(counts, (8, 10, 10), strict=True)
        ]
        timeline.say(f"  {name:<22} {' '.join(cells)}")
    timeline.say()
    checked = sum(sum(accepted.values()) for accepted in story["accepted"].values())
    timeline.say(
        f"  {checked} steps accepted, each compared with its exact value: {story['accepted_wrong']} wrong",
        "green" if story["accepted_wrong"] == 0 else "red",
    )
    rejected, wrong = story["rejected"], story["rejected_wrong"]
    timeline.say(f"  {rejected} interrupted steps rejected and run again; {wrong} of them held wrong sums")
    kept = "never moved" if story["addresses_kept"] else "MOVED"
    timeline.say(f"  peer tables and buffers {kept}", "green" if story["addresses_kept"] else "red")


def _after(begin: int, end: int) -> str:
    return f"+{(end - begin) / 1e6:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
