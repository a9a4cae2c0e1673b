"""A table of labels that says other cases than the store's manifest: refused by every command that reads both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from hyfi_core.runtime.checkpoint import read_model_json
from pathology.predict.inputs import find_inputs
from tests.workflows.archive import SPLITS, make_config
from tests.workflows.runs import run_here
from workflows.commands import split, validate
from workflows.config.load import load_config
from workflows.evaluation.labelled_inputs import InputLabels
from workflows.training.job import prepare

pytestmark = pytest.mark.usefixtures("in_process")


def test_a_table_that_contradicts_the_cases_of_the_store_is_refused_wherever_it_is_read(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two slides of the store that are of two cases there are of one in the table, both in one split."""
    config = make_config(tmp_path, store, run={"steps": 1})
    assert run_here(config) == 0
    table, checkpoint = tmp_path / "labels.csv", tmp_path / "run" / "checkpoints" / "latest"
    rows = [[f"slide-{n:02d}", f"P{n}", ("benign", "malignant")[n % 2], SPLITS[n]] for n in range(12)]
    for cases, refusal in (("P1", "slide-00 and slide-01 are of one case in the table"), ("P0", "")):
        rows[0][1] = cases
        table.write_text("\n".join(map(",".join, [["slide_id", "case_id", "label", "split"], *rows])))
        asked: list[Callable[[], object]] = [
            lambda: prepare(load_config(config, [f"data.labels={table}"])).labels.describe(),
            lambda: validate._dataset(
                read_model_json(checkpoint), validate.EvaluationRequest(checkpoint, store, table)
            ),
            lambda: InputLabels(table).of(find_inputs([store]), [store], read_model_json(checkpoint))[1],
            lambda: split.run(table, tmp_path / "splits.csv", None, "case_id", None, 0, store=store),
        ]
        for ask in asked:
            capfd.readouterr()
            if refusal:
                with pytest.raises(RequestError, match=f"labels.csv: case_id contradicts .*{refusal}"):
                    ask()
            else:
                said = str(ask()) + "".join(capfd.readouterr())
                assert "labels.csv: case_id has other names than the store's manifest.csv for 12 cases" in said
