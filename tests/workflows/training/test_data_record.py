"""A run that is resumed with other labels, splits or slides under the same paths is refused, with what has changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hyfi_core.runtime.checkpoint import load_training_state
from tests.workflows.archive import SPLITS, make_config
from tests.workflows.runs import run_here, run_on
from workflows.training.checks.data_record import changes_of
from workflows.training.metrics_log import read_metrics

pytestmark = pytest.mark.usefixtures("in_process")
CONSTANT = {"name": "constant"}


def write_labels(path: Path, **changed: tuple[str, str]) -> None:
    """Write the store's labels and splits as a table; ``changed``: (label, split) of some slides."""
    rows = ["slide_id,label,split"]
    for number, split in enumerate(SPLITS):
        label, split = changed.get(f"s{number}", (("benign", "malignant")[number % 2], split))
        rows.append(f"slide-{number:02d},{label},{split}")
    path.write_text("\n".join(rows) + "\n")


CHANGES = {
    "removed (1): slide-02 (train)": {"s2": ("benign", "")},
    "added (1): slide-10 (train)": {"s10": ("benign", "train")},
    "relabelled (1): slide-04 (from benign to malignant)": {"s4": ("malignant", "train")},
    "moved to another split (1): slide-05 (from train to val)": {"s5": ("malignant", "val")},
}


def test_labels_and_splits_that_changed_are_named_and_accepted_on_request(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    labels = tmp_path / "labels.csv"
    write_labels(labels)
    data = {"labels": str(labels), "splits": str(labels)}
    config = make_config(tmp_path, store, data=data, lr_schedule=CONSTANT)
    assert run_here(config, "run.steps=2") == 0
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    capfd.readouterr()
    for words, change in CHANGES.items():
        write_labels(labels, **change)
        assert run_here(config, resume=True) == 2
        said = capfd.readouterr().err
        assert f"its data have changed since step 2 was saved:\n  {words}\n" in said and "--accept-data" in said
        assert said.count(" (1): ") == 1 and "Traceback" not in said
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics
    write_labels(labels, **CHANGES["added (1): slide-10 (train)"])
    assert run_here(config, "run.steps=4", resume=True, accepts_changes=True) == 0
    said = capfd.readouterr().out
    assert "added (1): slide-10 (train)\nThe run goes on with them from step 3" in said
    assert run_here(config, "run.steps=5", resume=True) == 0  # they are what the run has now
    assert [r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"][-1] == 5


def test_another_content_is_refused_on_every_rank(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As after an ingest into the same folder; the file list of a slide has a digest of each of its files."""
    own = tmp_path / "own"
    shutil.copytree(store, own)
    config = make_config(tmp_path, own, lr_schedule=CONSTANT)
    assert run_here(config, "run.steps=1") == 0
    file = own / "slide-03.zarr" / "zarr.json"
    tree = json.loads(file.read_text())
    next(iter(tree["attributes"]["hyfi"]["shards"].values()))["sha256"] = "0" * 64
    file.write_text(json.dumps(tree))
    with pytest.raises(ValueError, match=r"other content in the store \(1\): slide-03"):
        run_on(2, config, "plan.grids=[[1,2]]", resume=True)


def test_checkpoints_without_a_record_are_continued(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, store, lr_schedule=CONSTANT)
    with monkeypatch.context() as patch:
        patch.setattr("workflows.training.loop.DATA_KEY", "other")
        assert run_here(config, "run.steps=1") == 0
    assert "data" not in load_training_state(tmp_path / "run" / "checkpoints" / "latest").state
    assert run_here(config, "run.steps=2", resume=True) == 0
    assert "does not record its slides and labels" in capfd.readouterr().out
    assert len(load_training_state(tmp_path / "run" / "checkpoints" / "latest").state["data"]) == 10


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda record: {}, []),
        (lambda record: {"a": "1\ttrain\t0.5\tx"}, ["drawn more or less often (1): a"]),
        (lambda record: {"b": record["b"], "a": record["a"]}, ["in another order in the store's manifest (2): b, a"]),
        (lambda record: {f"n{k}": "1\tval\t\tx" for k in range(10)}, ["added (10): n0 (val), n1 (val)", "and 2 more"]),
    ],
)
def test_each_kind_of_change_has_its_line(change: Callable[[dict[str, str]], dict[str, str]], words: list[str]) -> None:
    record = {"a": "1\ttrain\t\tx", "b": "2\tval\t\ta label,\twith a tab"}
    changed = change(record)
    now = changed if list(changed) == ["b", "a"] else {**record, **changed}
    lines = changes_of(record, now)
    assert len(lines) == (1 if words else 0)
    assert all(word in lines[0] for word in words)
