"""What a benchmark reads off views and tokens when several ranks are lost at once."""

from __future__ import annotations

from bench.shrink.loss import lines_until, loss_of
from bench.shrink.report import page
from eep.view import View


def view(epoch: int, active: tuple[int, ...], lives: tuple[int, ...]) -> View:
    return View(epoch=epoch, active=active, incarnations=lives)


VIEWS = [
    (1.0, view(1, (0, 1, 2, 3), (0, 0, 0, 0)), True),
    (10.1, view(2, (0, 1, 2), (0, 0, 0, 0)), True),
    (10.2, view(3, (0, 1), (0, 0, 0, 0)), False),
    (10.3, view(3, (0, 1), (0, 0, 0, 0)), True),
    (10.5, view(4, (0, 1, 2), (0, 0, 1, 0)), True),
    (10.9, view(5, (0, 1, 2, 3), (0, 0, 1, 1)), False),
    (11.0, view(5, (0, 1, 2, 3), (0, 0, 1, 1)), True),
]


def test_survivors_run_when_no_lost_life_is_in() -> None:
    loss = loss_of(VIEWS, {2: 0, 3: 0}, 10.0)
    assert loss is not None
    assert (loss.running, loss.epoch, loss.back) == (10.3, 3, 11.0)
    assert loss_of(VIEWS[:-1], {2: 0, 3: 0}, 10.0) is None


def test_enough_is_when_a_window_has_it() -> None:
    """Ten a second before, none for two seconds, then ten again."""
    loss = loss_of(VIEWS, {2: 0, 3: 0}, 10.0)
    assert loss is not None
    tokens = [0.1 * number for number in range(100)] + [12 + 0.1 * number for number in range(100)]
    told = loss.told(tokens)
    assert (told["lost"], told["before_per_s"], told["without_them_per_s"]) == (2, 10.0, 0.0)
    assert told["enough_s"] is not None
    assert 1.7 <= told["enough_s"] <= 2.0
    assert loss.told(tokens[:110])["enough_s"] is None


def test_lines_of_later_views_are_left_out() -> None:
    log = "[DP1] epoch 3: 2 experts brought in (6 KiB from peer)\nother\n[DP1] epoch 4: 1 experts brought in (3 KiB from it)"
    assert lines_until(log, 3) == log.splitlines()[0]


def test_a_page_has_a_row_for_each_loss() -> None:
    head = {
        **{"command": "python -m bench.shrink", "commit": "abc", "date": "2026-01-01"},
        "machine": {"cpu": "a cpu", "cores": 2, "python": "3", "torch": "2"},
        "setting": {
            **{"device": "cpu", "ranks": 4, "slots": 8, "experts": 16, "backup": "live", "spares": 0, "clients": 8},
            **{"tokens": 16, "sglang": "0.5"},
        },
        "requests": {"answered": 9, "failed": 0, "wrong": 0},
    }
    loss = loss_of(VIEWS, {2: 0, 3: 0}, 10.0)
    assert loss is not None
    told = {"losses": [{**loss.told([]), "brought_in": {"experts": 3, "peer": 2048}}]}
    assert "| 2 | 300 ms | 3 (2.0 MiB from peer) | 1.00 s | 0; 0 | not seen |" in page(head, told)
    assert "| 2 | 300 ms | 6 to 11 s, each of the two at most 21 s | 100 % peer | the more from DRAM" in page(
        head, told
    )
    told["losses"][0].update(lost=1, enough_s=2.0, brought_in={"experts": 0})
    assert "| what survivors have | mostly another GPU | 2.0 s | 52 s |" in page(head, told)
