"""The card of an exported model."""

from __future__ import annotations

from pathlib import Path

from workflows.export_model.model_card import _metrics, _table


def test_names_with_bars_and_line_breaks_stay_in_their_cell() -> None:
    *_, row, end = _table("Model", ("", ""), [("outputs, in order", "HER2 0|1+, HER2\n2+")])
    assert row == r"| outputs, in order | HER2 0\|1+, HER2 2+ |" and end == ""


def test_metrics_are_known_after_a_run_that_was_killed_while_it_wrote(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "validation", "step": 4, "auroc": 0.75}\n{"kind": "train", "st')
    card = _metrics(tmp_path / "checkpoints" / "step-00000004", {"step": 4})
    assert "| auroc | 0.7500 |" in card


def test_metrics_are_unknown_beside_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "validation", "step": 4, "auroc": 0.75\xff\n\xff\n[4]\n')
    card = _metrics(tmp_path / "checkpoints" / "step-00000004", {"step": 4})
    assert "Not known: the checkpoint does not lie in its run, or its step was not validated." in card
