"""A request that was handed to a rank of the real server and never got there is noticed, and sent again."""

from __future__ import annotations

import pytest

from eep.drill.faults import Target
from eep.drill.load import ask
from eep.drill.sglang_server import Server
from tests.sglang.drills import wait_for

pytestmark = pytest.mark.timeout(900)

PROMPT = list(b"Say it again")
POINT = "request.received"


@pytest.mark.long  # a rank has a minute to say that it received a request
def test_a_request_that_is_lost_on_its_way_is_sent_again(plain: Server) -> None:
    assert plain.directory is not None
    target = Target(plain.directory)
    wait_for(lambda: all(rank.is_in for rank in target.ranks().values()), "all ranks are in")
    lives = {number: rank.incarnation for number, rank in target.ranks().items()}
    wanted = ask(plain.url, PROMPT)
    target.arm(2, POINT, "drop")
    answer = ask(plain.url, PROMPT, rank=2, timeout=300.0)
    assert target.wait_until_fired(2, POINT, 1.0), "the request was not lost"
    assert (answer.problem, answer.tokens) == ("", wanted.tokens)
    assert "requests did not reach their ranks" in plain.log
    assert {number: rank.incarnation for number, rank in target.ranks().items()} == lives, "no rank is to blame"
