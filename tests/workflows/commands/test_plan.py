from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.checkpoint import amend_model_json
from tests.conftest import Hyfi
from tests.pathology.slides import draw_slide, write_slide
from tests.workflows.predictions import rows_of, save
from workflows.commands import plan, train
from workflows.config.load import asks_for_plan, dump_resolved, load_config

TEXT = """# a comment at the top
data: {store: STORE, target: label, size_px: 64, mpp: 1.0, batch_size: 2}
model: {name: resnet6, classes: 2, options: {width: 8}}
plan:                     # to be replaced
  grids: [[1, 2]]
  microbatches: 2

run: {dir: RUN, steps: 1}   # a comment at the end
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(TEXT.replace("STORE", str(tmp_path / "store")).replace("RUN", str(tmp_path / "run")))
    return path


def test_the_best_plans_are_told_and_written(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.run(config, [], "cpu", 2, None, None, 2, True, True) == 0
    text = capsys.readouterr().out
    found = json.loads(text.splitlines()[-1])
    first, second = found["plans"]
    assert first["step_s"] <= second["step_s"]
    assert {"plan", "step_s", "memory_bytes", "bubble", "bound_by"} <= set(first)
    assert "layer parallel: " in text and "× slower, ranks wait" in text
    assert set(found["alternatives"]) == {"data parallel", "spatial only", "layer parallel", "pipeline"}
    written = config.read_text()
    assert load_config(config).plan.build() == ParallelPlan.from_json(first["plan"])
    assert "# a comment at the top" in written and "# a comment at the end" in written
    assert "to be replaced" not in written and written.count("plan:") == 1
    assert [path.name for path in config.parent.iterdir()] == ["run.yaml"]


def test_nothing_is_written_where_nothing_is_asked_or_nothing_fits(config: Path) -> None:
    before = config.read_text()
    assert plan.run(config, [], "cpu", 1, "2GB", 4, 1, False, False) == 0
    with pytest.raises(RequestError, match="fits into"):
        plan.run(config, [], "cpu", 1, "300MB", None, 1, True, False)
    with pytest.raises(RequestError, match=r"data\.batch_size 2; change it there"):
        plan.run(config, [], "cpu", 1, None, 4, 1, True, False)
    assert config.read_text() == before


def test_cells_are_chosen_with_the_time_of_what_they_spill(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.size_px=2048", "model.options.width=64"]
    assert plan.run(config, words, "cpu", 1, "900MB", 1, 2, False, True) == 0
    text = capsys.readouterr().out
    found = json.loads(text.splitlines()[-1])["plans"]
    assert all(one["plan"]["spill"] == "." and one["moved_bytes"] > 0 for one in found)
    assert all(one["moving_s"] == pytest.approx(one["moved_bytes"] / 500e6) for one in found)
    assert found[0]["step_s"] <= found[1]["step_s"] and "go to the disk and back in" in text


def test_a_configuration_without_a_plan_gets_one(config: Path) -> None:
    config.write_text("\n".join(line for line in config.read_text().splitlines() if line[:2] not in ("pl", "  ")))
    wanted = ParallelPlan(grids=((1, 1), (1, 1)), cuts=("layer1",), microbatches=2)
    plan.write_plan(config, wanted)
    assert load_config(config).plan.build() == wanted


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("run: {dir: r, steps: 1}\ndata: {size_px: 512}\n", "data.store: missing"),  # given as an override
        ("run: {dir: r, steps: 1}\nplan:\n  cuts: auto\n# grids\n  grids: [[1, 2]]\ndata: {store: s}\n", "not YAML"),
    ],
)
def test_a_refused_plan_names_the_users_file(tmp_path: Path, text: str, reason: str) -> None:
    """It named a temporary file."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(RequestError, match=rf"^{path}: the plan cannot be written into it: (.|\n)*{reason}") as caught:
        plan.write_plan(path, ParallelPlan(grids=((1, 1),)))
    assert str(caught.value).count(".yaml") == 1 and path.read_text() == text


@pytest.mark.parametrize(("text", "length"), [("16GB", 16 * 10**9), ("800m", 8 * 10**8), ("1.5T", 1.5e12), ("12", 12)])
def test_amounts_of_memory(text: str, length: float) -> None:
    assert plan.bytes_of(text) == length


@pytest.mark.parametrize("text", ["", "GB", "much", "-1GB", "0", "nan", "inf", "1,5GB", "1.5.3GB"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="not an amount"):
        plan.bytes_of(text)


def auto(config: Path) -> Path:
    plan.write_plan(config, ParallelPlan(grids=((1, 1),)))
    config.write_text(config.read_text().replace("plan: {grids: [[1, 1]]}", "plan: auto"))
    assert asks_for_plan(config)
    return config


def test_plan_auto_is_refused_where_nobody_chooses(config: Path) -> None:
    with pytest.raises(RequestError, match=r"hyfi plan .* --ranks N --write"):
        load_config(auto(config))
    assert load_config(config, ["plan.grids=[[1, 2]]"]).plan.grids == ((1, 2),)
    # On the command line, over a plan of the file.
    config.write_text(config.read_text().replace("plan: auto", "plan: {grids: [[1, 1]], microbatches: 2}"))
    assert not asks_for_plan(config) and asks_for_plan(config, ["plan=auto"])
    assert load_config(config, ["plan=auto", "plan.grids=[[1, 2]]"]).plan.microbatches == 1
    config.write_text(config.read_text().replace("plan: {grids: [[1, 1]], microbatches: 2}", "plan: auto"))
    assert not asks_for_plan(config, ["plan.grids=[[1, 2]]"])


def test_training_chooses_its_plan(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], int, Path]] = []
    monkeypatch.setattr("workflows.launch.launch.launch", lambda *given: started.append(given) or 0)
    monkeypatch.setattr("workflows.launch.request.check_run", lambda settings, resume: 0)
    assert train.run(train.TrainArguments(config=auto(config), overrides=["roles.loaders=1"], ranks=3)) == 0
    ((words, ranks, folder),) = started
    chosen = load_config(config, [word for word in words if "=" in word])
    assert folder == chosen.run.dir
    assert ranks == 3 and chosen.plan.ranks == 2 and chosen.roles.loaders == 1
    with pytest.raises(RequestError, match="loaders and validators take 1, and none is left to train"):
        train.run(train.TrainArguments(config=config, overrides=["roles.loaders=1"], ranks=1))


def test_a_resumed_run_keeps_the_plan_that_was_chosen(config: Path) -> None:
    auto(config)
    folder = load_config(config, ignore_plan=True).run.dir
    folder.mkdir()
    begun = load_config(config, ["plan.grids=[[2, 1]]", "plan.microbatches=2"])
    (folder / "config.yaml").write_text(dump_resolved(begun))
    words = plan.chosen_plan(config, [], 4, resume=True)
    assert load_config(config, words).plan.build() == begun.plan.build()


def recommended(hyfi_here: Hyfi, tmp_path: Path, *words: str | Path) -> list[str]:
    """Return the command of the best plan for predictions, with a slide and a folder in the places of its capitals."""
    said = hyfi_here("plan", tmp_path / "checkpoint", "--for", "predict", "--ranks", "1", "--json", *words)
    assert said.returncode == 0, said.stderr
    (found, *_) = json.loads(said.stdout.splitlines()[-1])["plans"]
    places = {"SLIDES": str(tmp_path / "one.tiff"), "OUT": str(tmp_path / "out"), "FOLDER": str(tmp_path / "spill")}
    return [places.get(word, word) for word in found["command"]]


def test_a_checkpoint_trained_with_tf32_is_planned_with_it(hyfi_here: Hyfi, tmp_path: Path) -> None:
    """Predictions round to TF32 as the training did, so the forecast does, too."""
    seconds = {}
    for tf32 in (False, True):
        checkpoint = save(tmp_path / f"checkpoint-{tf32}")
        amend_model_json(checkpoint, {"tf32": tf32, "precision": "float32"})
        said = hyfi_here("plan", checkpoint, "--for", "predict", "--ranks", "1", "--machine", "a100", "--json")
        assert said.returncode == 0, said.stderr
        seconds[tf32] = json.loads(said.stdout.splitlines()[-1])["plans"][0]["slide_s"]
    assert seconds[True] < seconds[False]


@pytest.mark.parametrize("side", [None, 2])
def test_the_planned_prediction_runs(
    hyfi_here: Hyfi, tmp_path: Path, side: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "checkpoint")
    write_slide(tmp_path / "one.tiff", draw_slide())
    if side is not None:  # so small a slide has no need of cells
        monkeypatch.setattr("hyfi_core.cells.prediction_plans._CELLS", (side,))
    program, *words = recommended(hyfi_here, tmp_path)
    assert program == "hyfi" and words[:2] == ["predict", str(tmp_path / "checkpoint")]
    assert ("--cells" in words) == (side is not None)
    said = hyfi_here(*words, OMP_NUM_THREADS="1")
    assert said.returncode == 0, said.stderr
    assert rows_of(tmp_path / "out")["one"]["status"] == "done"


def test_a_planned_prediction_that_leaves_memory_runs(
    hyfi_here: Hyfi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limit is that of this process, which has loaded more than a rank."""
    save(tmp_path / "checkpoint")
    write_slide(tmp_path / "one.tiff", draw_slide())
    (tmp_path / "spill").mkdir()
    monkeypatch.setattr("hyfi_core.cells.prediction_plans.evaluation_bytes", lambda *given: 10**13)
    words = recommended(hyfi_here, tmp_path, "--memory", "4GB")
    assert words[-4:] == ["--memory", "4000000000", "--spill", str(tmp_path / "spill")]
    said = hyfi_here(*words[1:], OMP_NUM_THREADS="1")
    assert said.returncode == 0, said.stderr
    assert rows_of(tmp_path / "out")["one"]["status"] == "done"


def test_a_prediction_that_does_not_fit_is_refused_with_what_would_do(hyfi_here: Hyfi, tmp_path: Path) -> None:
    save(tmp_path / "checkpoint")
    said = hyfi_here("plan", "checkpoint", "data.size_px=8192", "--for", "predict", "--ranks", "2", "--memory", "1MB")
    assert said.returncode == 2 and "the smallest needs 0." in said.stderr
    least = said.stderr.split("the smallest needs ")[1].split(" GB")[0]
    assert hyfi_here(*said.args[:-1], f"{1.01 * float(least)}GB").returncode == 0


def test_wrong_questions_about_predictions_are_refused(config: Path, hyfi_here: Hyfi, tmp_path: Path) -> None:
    save(tmp_path / "checkpoint")
    for words, cause in (
        ((config, "--for", "lunch"), "use train, predict or validate"),
        ((config, "--for", "predict", "--write"), "--write with --for predict"),
        ((config, "--for", "predict", "--batch", "3"), "--batch with --for predict"),
        (("checkpoint",), "is a folder; give the YAML"),
        (("checkpoint", "data.mpp=2", "--for", "predict"), "only data.size_px can be set"),
        (("checkpoint", "data.size_px=[1", "--for", "validate"), "use one or two whole numbers"),
    ):
        said = hyfi_here("plan", *words)
        assert said.returncode == 2 and cause in said.stderr and "Traceback" not in said.stderr, said.stderr


def test_a_configuration_is_planned_for_evaluation(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.run(config, [], "h100", 2, None, None, 5, False, True, "validate") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    commands = [one["command"] for one in found["plans"]]
    shared = ["hyfi", "validate", "CHECKPOINT", "--store", "STORE", "--ranks", "2"]
    assert shared in commands and [*shared, "--cells", "1,1"] in commands
    assert found["plans"][0]["seconds_per_slide"] <= found["plans"][1]["seconds_per_slide"]


@pytest.mark.parametrize(
    ("step_s", "words"), [(1.0, "as fast as"), (1.02, "1.02× slower"), (2.94, "2.9× slower"), (1.004, "as fast as")]
)
def test_how_much_slower_an_alternative_is(step_s: float, words: str) -> None:
    best = SimpleNamespace(step_s=1.0)
    other = SimpleNamespace(step_s=step_s, exposed_s={}, bubble=0.0)
    assert plan._comparison(cast(Any, other), cast(Any, best)).startswith(words)
