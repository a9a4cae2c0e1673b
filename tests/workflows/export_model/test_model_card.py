"""The card of an exported model."""

from __future__ import annotations

from workflows.export_model.model_card import _table


def test_names_with_bars_and_line_breaks_stay_in_their_cell() -> None:
    *_, row, end = _table("Model", ("", ""), [("outputs, in order", "HER2 0|1+, HER2\n2+")])
    assert row == r"| outputs, in order | HER2 0\|1+, HER2 2+ |" and end == ""
