"""The real server on two hosts whose ranks are on a GPU: a rank is lost, and then a host, and both come back.

The hosts are those of ``test_hosts.py``. Ranks that are killed end all processes of a GPU under MPS, as
``tests/gpu/test_hosts.py`` says: so the ranks take turns here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.common import host_servers
from bench.common.host_servers import RANKS_EACH
from eep.drill.devices import CUDA
from tests.data_plane.transport.requirements import why_no_links
from tests.gpu.sglang.conftest import Alone
from tests.sglang.drills import Drilled, lives_of, wait_for_answers

_reason = host_servers.why_not_on_loopback() or why_no_links("cuda")
pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.without_mps,
    pytest.mark.skipif(_reason is not None, reason=str(_reason)),
]
ALL, VICTIM = 2 * RANKS_EACH, RANKS_EACH
TOKENS, CLIENTS, PATIENCE_S = 16, 4, 600


def test_a_rank_and_a_host_are_lost_and_return(alone: Alone, model: Path, tmp_path: Path) -> None:
    with host_servers.running_on_loopback(model, tmp_path, CUDA, {}) as hosts:
        wanted = [answer[:TOKENS] for answer in alone.wanted]
        near, far = (Drilled(server, ALL, alone.prompts, wanted) for server in hosts.servers)
        here, there = near.story(CLIENTS), far.story(CLIENTS)
        with here.load, there.load:
            for story in (here, there):
                wait_for_answers(story.load, CLIENTS, PATIENCE_S)
            lives = lives_of(there, VICTIM)
            there.kill(VICTIM)
            assert there.wait_until_back(ALL, lives), hosts.log(1)[-3000:]
            for story in (here, there):
                wait_for_answers(story.load, CLIENTS, PATIENCE_S)
        near.check(here)
        far.check(there)
        story = near.story(CLIENTS)
        with story.load:
            wait_for_answers(story.load, CLIENTS, PATIENCE_S)
            hosts.servers[1].kill()
            assert story.wait_until_run(range(RANKS_EACH)), hosts.log(0)[-3000:]
            wait_for_answers(story.load, CLIENTS, PATIENCE_S)
            hosts.start_again(1)
            assert story.wait_until_all_run(ALL), hosts.log(0)[-3000:]
            wait_for_answers(story.load, CLIENTS, PATIENCE_S)
        near.check(story)
