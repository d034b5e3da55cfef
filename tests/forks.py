"""Where processes of tests are forked from: one server for all tests of this process, which has imported what they need.

There is one such server whatever asks for it, and what is said last of its imports holds. So it is said here, for all.
"""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
# What cannot be imported is left out. What is not here, each process that needs it imports again: two tenths of a second for
# the groups of processes.
CONTEXT.set_forkserver_preload(
    [
        *("torch._dynamo", "torch.distributed", "eep.data_plane.buffer", "eep.faults", "eep.process_group.backend"),
        *("tests.ranks", "tests.process_group.hosts.host_members", "tests.data_plane.transport.host_ranks"),
        *("tests.compat.deep_ep_ranks", "tests.experts.ranks", "tests.experts.far_ranks"),
    ]
)
