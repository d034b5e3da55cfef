from __future__ import annotations

from typing import Any

from eep.operations.held_experts import HeldExperts
from sglang_patches.front_end.gauges import figures_of, spares_of

HELD = HeldExperts([[1, 0, 2], [1, 1, 0]], {0: 3})
STATUS: dict[str, Any] = {
    "phase": "RUN",
    "margin": {"any_ranks": 1, "repairable_ranks": 2, "ranks": []},
    "spares": {"kind": "whole", "ready": 1, "wanted": 2, "preparing": 1},
}


def test_a_status_becomes_figures() -> None:
    found = figures_of(STATUS, HELD, masks=True)
    assert found == {
        **{"margin_any": 1, "margin_repairable": 2, "uncovered": 2, "masked": 2},
    }
    assert spares_of(STATUS) == ("whole", {"spares_ready": 1, "spares_wanted": 2})
    assert figures_of(STATUS, HELD, masks=False)["masked"] == 0


def test_what_is_not_known_is_left_as_it_was() -> None:
    bare = {"phase": "AGREED", "margin": None, "spares": None}
    assert figures_of(bare, HELD, masks=True) == {}, "ranks that repair have not said yet what they hold"
    assert spares_of(bare) == ("", {})
    assert figures_of({**bare, "phase": "RUN"}, HeldExperts([], {}), masks=True) == {}


def test_a_backup_that_has_ended_holds_nothing_and_what_it_was_to_hold_stays() -> None:
    backup = {"pid": 5, "held": 40, "wanted": 48, "bytes": 80}
    found = figures_of({**STATUS, "backup": backup}, HELD, masks=False)
    assert {name: found[name] for name in found if name.startswith("backup")} == {
        **{"backup_held": 40, "backup_wanted": 48, "backup_bytes": 80},
    }
    gone = figures_of({**STATUS, "backup": {"pid": None, "held": 0, "wanted": None, "bytes": 0}}, HELD, masks=False)
    assert {name: gone[name] for name in gone if name.startswith("backup")} == {"backup_held": 0, "backup_bytes": 0}
