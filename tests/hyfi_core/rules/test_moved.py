"""What ranks send for functions of a map is what the table says."""

from __future__ import annotations

from pathlib import Path

from tests.hyfi_core.rules.moved import lines


def test_nothing_more_is_moved_than_the_table_says() -> None:
    """After a change that is meant: ``python -m tests.hyfi_core.rules.moved > tests/hyfi_core/rules/moved.txt``."""
    stored = Path(__file__).with_name("moved.txt").read_text("utf-8").splitlines()
    changed = [(before, now) for before, now in zip(stored, lines(), strict=True) if before != now]
    assert not changed
