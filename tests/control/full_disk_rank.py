"""A rank that needs what a server's rank needs of its directory: a claim, a socket, and a record that each view changes."""

from __future__ import annotations

import time

from eep.control.member import Member
from eep.control.private_directory import member_rendezvous
from eep.data_plane.memory.descriptor_service import DescriptorProtocol, DescriptorServer
from eep.data_plane.rendezvous import Rendezvous
from eep.experts.registry.directory_registry import DirectoryRegistry
from eep.view import View

RECORD_BYTES = 20_000


def main() -> None:
    member = Member.connect()
    claim = Rendezvous(member_rendezvous()).claim(member.rank, member.incarnation)
    server = DescriptorServer(claim.socket_path, DescriptorProtocol(b"", 0, 0), [], lambda: b"")
    registry = DirectoryRegistry(member_rendezvous() / "held")
    key = f"r{member.rank}.i{member.incarnation}"

    def repair(view: View) -> None:
        registry.publish(key, str(view.epoch).encode().ljust(RECORD_BYTES))

    member.ready()
    while member.boundary(repair) is not None:
        time.sleep(0.002)
    server.close()
    registry.close()
    claim.close()
