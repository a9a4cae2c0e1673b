"""The whole job, small: every command, four processes, a report at the end."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hyfi_core.errors import RequestError
from workflows.commands import demo
from workflows.commands.demo import Archive

SMALL = Archive(slides=12, size_px=512, seed=3)
OVERRIDES = ["data.size_px=256", "data.min_coverage=0.5", "data.batch_size=2", "run.epochs=1", "model.options.width=4"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    out = tmp_path_factory.mktemp("whole") / "demo"
    return out, demo.run(out, as_json=False, archive=SMALL, overrides=OVERRIDES)


@pytest.mark.mpi
def test_the_whole_job(done: tuple[Path, int]) -> None:
    out, code = done
    assert code == 0
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["seconds"]) == {"synth", "ingest", "train", "predict"}
    assert Path(summary["report"]).read_text().lstrip().lower().startswith("<!doctype html>")
    assert set(summary["metrics"]) >= {"auroc", "balanced_accuracy"}


@pytest.mark.mpi
def test_predicted_slides_were_held_out(done: tuple[Path, int]) -> None:
    out, _ = done
    with (out / "predictions" / "predictions.csv").open(newline="") as file:
        predicted = {row["slide_id"]: row for row in csv.DictReader(file)}
    stored = {path.name.removesuffix(".zarr") for path in (out / "store").glob("*.zarr")}
    assert predicted
    assert stored
    assert not stored & set(predicted)
    assert len(stored) + len(predicted) == SMALL.slides
    for row in predicted.values():
        assert float(row["p_benign"]) + float(row["p_malignant"]) == pytest.approx(1, abs=1e-5)


@pytest.mark.mpi
def test_the_run_had_a_validator_and_kept_its_promises(done: tuple[Path, int]) -> None:
    run = done[0] / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} == {"train", "validation"}
    roles = yaml.safe_load((run / "config.yaml").read_text())["roles"]
    assert (roles["loaders"], roles["validators"], roles["design"]) == (1, 1, None)
    assert (run / "checkpoints" / "best" / "model.json").is_file()
    assert (run / "checkpoints" / "latest" / "model.safetensors").is_file()
    assert (run / "coverage.csv").is_file()
    assert any((run / "tensorboard").iterdir())


def _prepare(out: Path, **parameters: Any) -> None:
    demo._prepare(out, parameters)


def test_an_unfinished_demo_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    _prepare(out, seed=1)
    (out / "slides").mkdir()
    _prepare(out, seed=1)
    assert (out / "slides").exists()


@pytest.mark.parametrize(("finished", "seed"), [(True, 1), (False, 2)])
def test_another_demo_is_made_anew(tmp_path: Path, finished: bool, seed: int) -> None:
    out = tmp_path / "demo"
    _prepare(out, seed=1)
    (out / "slides").mkdir()
    demo._mark(out, {"seed": 1}, finished=finished)
    _prepare(out, seed=seed)
    assert [path.name for path in out.iterdir()] == [demo.MARKER]
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RequestError, match="was not written by hyfi demo"):
        _prepare(tmp_path, seed=1)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_command_that_fails_ends_the_demo_with_its_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.run(tmp_path / "demo", as_json=False, archive=Archive(slides=2, size_px=300)) == 2
    out, err = capfd.readouterr()
    assert "hyfi synth ended with exit code 2" in out
    assert "--size is 300" in err


@pytest.mark.parametrize("name", ["demo/store", "a: b", "null", "yes", "1.0", "[x]"])
def test_paths_survive_yaml(name: str) -> None:
    assert yaml.safe_load(demo._yaml(Path(name))) == name
