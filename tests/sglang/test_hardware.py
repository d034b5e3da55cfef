"""A real server whose devices a process watches: a device that is lost takes its ranks out at once, a hot one has them leave,
and every answer is right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eep.drill.load import Load
from eep.drill.sglang_server import FOUR_RANKS, Server
from eep.drill.story import Story
from eep.hardware.rank_device import write_device
from eep.observe.event_log import read_events
from tests.hardware.test_nvml_reader import STAND_IN, Machine
from tests.sglang.drills import check_end, lives_of, wait_for_answers

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

RANKS = 4


def test_a_lost_device_fences_its_ranks_and_a_hot_one_has_them_replaced(
    sglang: None, model: Path, tmp_path: Path
) -> None:
    machine = Machine(tmp_path / "state.json")
    environment = {
        "PYTHONPATH": os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]),
        "EEP_TEST_NVML": str(machine.path),
    }
    directory = tmp_path / "d"
    flags = (*FOUR_RANKS, "--eep-timeout-ms", "20000", "--eep-watch-devices", "on")
    server = Server(model, flags, tmp_path / "log", directory=directory, environment=environment)
    with server:
        for rank, name in enumerate(("GPU-a", "GPU-b", "GPU-c", "GPU-c")):
            write_device(directory, rank, name)
        prompts = [list(f"Fall off the bus {number}".encode()) for number in range(6)]
        story = Story(directory, Load.with_reference(server.url, prompts, clients=4))
        with story.load:
            for rank, state in ((0, {"lost": ["GPU-a"]}), (1, {"temperature": {"GPU-b": 89}})):
                wait_for_answers(story.load)
                lost = lives_of(story, rank)
                machine.show(**state)
                assert story.wait_until_back(RANKS, lost), server.log[-3000:]
            wait_for_answers(story.load)
        story.close()
        assert [answer.problem for answer in story.load.failed] == []
        assert [(answer.prompt, answer.tokens) for answer in story.load.wrong] == []
        lines = [(line.phase, line.rank) for line in read_events(directory / "events.jsonl")]
        assert lines.count(("FENCING", 0)) == 1
        assert lines.count(("LEAVING", 1)) == 1
        assert {rank for phase, rank in lines if phase == "EVIDENCE"} == {0, 1}
    check_end(server)
