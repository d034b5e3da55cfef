"""The table of reactions: what it says by itself, what an operator may put in its place, and what is no table."""

from __future__ import annotations

from pathlib import Path

import pytest

from eep.hardware.reaction_table import BadReactions, Reaction, ReactionTable, parse_table, read_table


@pytest.mark.parametrize(
    ("sign", "severity", "reaction"),
    [
        ("lost", "info", Reaction.FENCE),
        ("xid.79", "info", Reaction.FENCE),
        ("xid.31", "fatal", Reaction.NOTE),
        ("xid.74", "fatal", Reaction.REPLACE),
        ("xid.99999", "fatal", Reaction.NOTE),
        ("smells-burnt", "fatal", Reaction.FENCE),
        ("smells-burnt", "warning", Reaction.REPLACE),
        ("smells-burnt", "info", Reaction.NOTE),
    ],
)
def test_a_row_decides_and_the_severity_where_there_is_none(sign: str, severity: str, reaction: Reaction) -> None:
    assert read_table().reaction_to(sign, severity) is reaction


def test_an_empty_table_only_notes() -> None:
    assert ReactionTable({}).reaction_to("lost", "fatal") is Reaction.NOTE


def test_rows_of_a_file_take_the_place_of_others(tmp_path: Path) -> None:
    path = tmp_path / "reactions.toml"
    path.write_text('"xid.31" = "fence"\n"xid.*" = "replace"\n"smells-burnt" = "note"\n')
    table = read_table(path)
    assert table.reaction_to("xid.31") is Reaction.FENCE
    assert table.reaction_to("xid.999") is Reaction.REPLACE
    assert table.reaction_to("smells-burnt", "fatal") is Reaction.NOTE
    assert table.reaction_to("lost") is Reaction.FENCE


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('"xid.79" = "reboot"', "must be 'fence', 'replace' or 'note', not 'reboot'"),
        ('"xid.79" = 3', "not 3"),
        ('xid.79 = "fence"', "in quotes"),
        ('"a b" = "note"', "is no name of a sign"),
        ('"x" = ', "is no TOML"),
    ],
)
def test_what_is_no_table_is_refused_and_says_where(text: str, says: str) -> None:
    with pytest.raises(BadReactions, match=says):
        parse_table(text)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadReactions, match="cannot be read"):
        read_table(tmp_path / "none")
    (tmp_path / "large").write_bytes(b"#" * (1 << 20))
    with pytest.raises(BadReactions, match="more than"):
        read_table(tmp_path / "large")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(BadReactions, match="cannot be read"):
        read_table(tmp_path / "bytes")
