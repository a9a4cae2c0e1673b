"""The log of a run's numbers: what a machine or an editor has damaged does not hide the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workflows.commands.status import read_status
from workflows.training.metrics_log import MetricsLog, read_metrics

STEPS = [{"kind": "train", "step": step, "loss": 0.5} for step in (1, 2)]


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"\0\0\0", b"[1, 2]", b"12", b"null", b'{"a": 1}', b'{"kind": "tr'])
def test_damaged_lines_are_skipped(tmp_path: Path, damage: bytes) -> None:
    """``hyfi status`` and ``--resume`` ended with a traceback."""
    lines = [json.dumps(line).encode() for line in STEPS]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([lines[0], damage, lines[1], damage]))
    (tmp_path / "config.yaml").write_text("run: {}\n")
    (tmp_path / "status.json").write_bytes(b"\xff")
    assert read_metrics(tmp_path / "metrics.jsonl") == STEPS
    assert read_status(tmp_path)["step"] == 2
    log = MetricsLog(tmp_path / "metrics.jsonl", until_step=1)
    log.write("train", step=2, loss=0.25)
    log.close()
    assert [record["loss"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0.5, 0.25]
