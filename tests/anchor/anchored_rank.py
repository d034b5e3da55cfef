"""A rank with memory that outlives it. It adds its life to what it finds there."""

from __future__ import annotations

import os
import time
from pathlib import Path

from eep.anchor.anchor import Anchor
from eep.control.member import Member
from eep.data_plane.memory.shm import SharedMemory

SIZE = 1 << 20


def main() -> None:
    directory, rank, life = (os.environ[name] for name in ("EEP_CONTROL_DIR", "EEP_RANK", "EEP_INCARNATION"))
    anchor = Anchor(Path(directory), int(rank), int(life))
    memory, inherited = anchor.attach("kv", SIZE, SharedMemory)
    bytes_of = memory.bytes_at(0, SIZE)
    found = bytes_of[:8].tolist()
    bytes_of[int(life)] = int(life) + 1
    Path(directory, f"found-{rank}-{life}").write_text(f"{inherited} {found}")
    member = Member.connect()
    member.ready()
    while member.boundary() is not None:
        time.sleep(0.002)
