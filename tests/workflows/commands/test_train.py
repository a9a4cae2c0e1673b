"""A run from its YAML to its files; one rank in this process where that is enough, real MPI where it is not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from data.csv_table import read_table
from data.samples.trained.trained_slides import TrainedSlides
from hyfi_core.errors import RequestError
from hyfi_core.models.by_name import build_model
from hyfi_core.runtime.checkpoint import amend_model_json, load_checkpoint, read_model_json
from hyfi_core.runtime.engine import Engine
from tests.workflows.archive import make_config
from tests.workflows.runs import assert_same_run, losses, run_here, run_on, weights_of
from workflows.commands import split, validate
from workflows.config.load import load_config
from workflows.launch.owner import FolderOwner
from workflows.launch.request import check_ranks
from workflows.tasks.multiclass import Multiclass
from workflows.tasks.task import make_loss
from workflows.training.best import merit
from workflows.training.metrics_log import read_metrics
from workflows.training.optimisation import lr_factor

pytestmark = pytest.mark.usefixtures("in_process")

CONSTANT = {"name": "constant", "warmup_steps": 2}
FOUR = ["plan.grids=[[1,2]]", "roles.loaders=1", "roles.validators=1"]


def test_a_run_writes_what_is_promised(tmp_path: Path, store: Path) -> None:
    config = make_config(tmp_path, store, run={"tensorboard": True})
    assert run_here(config) == 0
    run = tmp_path / "run"
    records = read_metrics(run / "metrics.jsonl")
    trained = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in trained] == [1, 2, 3, 4, 5, 6]
    assert [r["epoch"] for r in trained] == [0, 0, 0, 1, 1, 1]
    keys = {"kind", "step", "epoch", "loss", "lr", "seconds", "images_per_second", "wait_seconds"}
    assert all(keys <= r.keys() for r in trained)
    assert [r["lr"] for r in trained[:3]] == [0.005, 0.01, 0.01]
    validated = [r for r in records if r["kind"] == "validation"]
    assert [r["step"] for r in validated] == [3, 6]
    assert all({"loss", "auroc", "balanced_accuracy"} <= r.keys() for r in validated)
    assert load_config(run / "config.yaml") == load_config(config)
    page = (run / "curves.html").read_text()
    assert "6 steps" in page and "<h2>auroc" in page
    assert json.loads((run / "plan.json").read_text())["grids"] == [[1, 1]]
    assert len((run / "coverage.csv").read_text().splitlines()) == 1 + 10
    assert list((run / "tensorboard").glob("events.*"))
    assert (run / "checkpoints" / "latest").resolve().name == "step-00000006"
    best = max(validated, key=lambda r: (*merit(r, "auroc"), -r["step"]))
    assert (run / "checkpoints" / "best").resolve().name == f"step-{best['step']:08d}"
    model = load_checkpoint(run / "checkpoints" / "best").model
    assert model["class_names"] == ["benign", "malignant"] and model["step"] == best["step"]
    assert {"mpp", "size_px", "view", "tissue", "normalisation", "thresholds", "versions", "task"} <= model.keys()
    module = build_model(model["model"])
    module.load_state_dict(load_checkpoint(run / "checkpoints" / "best").weights)


@pytest.mark.parametrize("factory", ["tiny", "dropping"])
def test_six_steps_are_three_and_three_more(tmp_path: Path, store: Path, factory: str) -> None:
    model = {"name": f"tests.workflows.faults:{factory}"}
    straight = make_config(tmp_path, store, lr_schedule=CONSTANT, model=model)
    assert run_here(straight) == 0
    assert run_here(straight, f"run.dir={tmp_path / 'parts'}", "run.steps=3") == 0
    assert run_here(straight, f"run.dir={tmp_path / 'parts'}", resume=True) == 0
    assert_same_run(tmp_path / "run", tmp_path / "parts", 6)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_stopped_run_goes_on_as_if_nothing_had_been(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    config = make_config(tmp_path, store, optimizer={"name": optimizer, "accumulate": 2}, run={"steps": 16})
    assert run_here(config, f"run.dir={tmp_path / 'straight'}") == 0
    whole, update = Engine.update_unread, count(1)

    def signalled(self: Engine, *args: Any, **kwargs: Any) -> None:
        if next(update) == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        whole(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "update_unread", signalled)
    assert run_here(config) == 3
    assert max(r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")) == 5
    assert (tmp_path / "run" / "checkpoints" / "latest").resolve().name == "step-00000005"
    assert run_here(config, resume=True) == 0
    assert_same_run(tmp_path / "straight", tmp_path / "run", 16)


def test_lines_after_the_checkpoint_are_dropped(tmp_path: Path, store: Path) -> None:
    config = make_config(tmp_path, store, lr_schedule=CONSTANT, run={"steps": 3})
    assert run_here(config) == 0
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "train", "step": 4, "loss": 9}\n{"kind": "tra')
    assert run_here(config, "run.steps=6", resume=True) == 0
    assert [r["step"] for r in read_metrics(path) if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert all(json.loads(line)["loss"] < 9 for line in path.read_text().splitlines())


def test_a_validation_that_a_stop_prevented_is_made_up_for(tmp_path: Path, store: Path) -> None:
    config = make_config(tmp_path, store, lr_schedule=CONSTANT)
    assert run_here(config) == 0
    path = tmp_path / "run" / "metrics.jsonl"
    before = losses(tmp_path / "run")
    path.write_text("".join(line for line in path.open() if '"validation"' not in line))
    (tmp_path / "run" / "checkpoints" / "best").unlink()
    assert run_here(config, resume=True) == 0
    assert losses(tmp_path / "run") == before
    assert (tmp_path / "run" / "checkpoints" / "best").exists()


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_longer_run_has_the_rates_of_its_new_length_at_once(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str], schedule: str
) -> None:
    """The first step after it had the last rate of the old schedule: 0, and nothing was learnt in it."""
    config = make_config(tmp_path, store, lr_schedule={"name": schedule}, validation={"every_steps": 50})
    assert run_here(config, "run.steps=3") == 0
    before = weights_of(tmp_path / "run", 3)
    assert run_here(config, "run.checkpoint_every_steps=1", resume=True) == 0
    factor = lr_factor(load_config(config).lr_schedule, 6)
    rates = [r["lr"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert rates[3:] == [0.01 * factor(step) for step in (3, 4, 5)]
    assert not torch.equal(before["fc.bias"], weights_of(tmp_path / "run", 4)["fc.bias"])
    said = capfd.readouterr().out
    assert f"the schedule of 6 steps from now on: step 4 has {rates[3]:.6g}" in said and "of 3 steps had 0" in said


def test_resume_of_a_mistyped_folder_names_the_one_beside_it(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It began a new run without a word."""
    config = make_config(tmp_path, store, run={"steps": 1})
    assert run_here(config) == 0
    capfd.readouterr()
    assert run_here(config, f"run.dir={tmp_path / 'rnu'}", resume=True) == 0
    said = capfd.readouterr().err
    assert f"{tmp_path / 'rnu'}: there is no run to resume, a new one starts; did you mean {tmp_path / 'run'}?" in said
    assert run_here(config, resume=True) == 0
    assert "no run to resume" not in capfd.readouterr().err


def test_resume_of_nothing_begins_without_a_warning(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The script of `hyfi launch slurm` resumes at its first start, too."""
    assert run_here(make_config(tmp_path, store, run={"steps": 1}), resume=True) == 0
    said = capfd.readouterr()
    assert "first start of this run" in said.out and "no run to resume" not in said.out + said.err


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("overrides", "resume", "words"),
    [
        ([], False, "--resume"),
        (["data.batch_size=3"], True, "data.batch_size"),
        (["optimizer.lr=0.5"], True, "optimizer.lr"),
    ],
)
def test_an_existing_run_is_left_alone(
    tmp_path: Path, store: Path, overrides: list[str], resume: bool, words: str
) -> None:
    config = make_config(tmp_path, store, run={"steps": 1})
    assert run_here(config) == 0
    before = everything_in(tmp_path / "run")
    with pytest.raises(RequestError, match=words):
        run_here(config, *overrides, resume=resume)
    assert everything_in(tmp_path / "run") == before


def test_fewer_steps_than_a_run_has_are_refused(tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run then said that it was done after 2 steps, with the weights of 3."""
    config = make_config(tmp_path, store, run={"steps": 3}, validation={"every_steps": 1})
    assert run_here(config) == 0
    before = everything_in(tmp_path / "run")
    assert run_here(config, "run.steps=2", resume=True) == 2
    assert "given 2 steps, but run" in (said := capfd.readouterr().err) and "has 3 already" in said
    assert everything_in(tmp_path / "run") == before
    assert run_here(config, "run.steps=2", resume=True, source="step-2") == 0


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path, store: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "letter.txt").write_text("dear all")
    with pytest.raises(RequestError, match="is not a run"):
        run_here(make_config(tmp_path, store), resume=True)
    assert everything_in(tmp_path / "run") == {"letter.txt": b"dear all"}


def refused(
    capfd: pytest.CaptureFixture[str], folder: Path, config: Path, *overrides: str, resume: bool = False
) -> str:
    """Return what is said of a request that the ranks refuse: exit code 2, nothing written."""
    assert run_here(config, *overrides, resume=resume) == 2
    assert not (folder / "run").exists() or resume
    return capfd.readouterr().err


def test_wrong_requests_are_refused_before_anything_is_written(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, store)
    with pytest.raises(RequestError, match=r"3 ranks were started, but the run needs 1: 1 trainers.*--ranks 1"):
        run_here(config, ranks=3)
    said = refused(capfd, tmp_path, config, "data.size_px=128", "data.view=crop")
    assert "min_coverage" in said and "slide-00" in said and "size_px" in said
    assert "'grade'" in refused(capfd, tmp_path, config, "data.target=grade")
    assert "resnet18" in refused(capfd, tmp_path, config, "model.name=resnet19")
    assert "depth" in refused(capfd, tmp_path, config, "model.name=resnet10", "model.options.depth=3")
    assert "model.classes" in refused(capfd, tmp_path, config, "model.classes=3")
    assert "no-such-file" in refused(capfd, tmp_path, config, "model.weights=no-such-file.pth")
    assert "not a store" in refused(capfd, tmp_path, config, f"data.store={tmp_path}")


def test_a_damaged_checkpoint_is_refused_and_kept(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, store, run={"steps": 3})
    assert run_here(config) == 0
    os.truncate(tmp_path / "run" / "checkpoints" / "step-00000003" / "optimizer.safetensors", 100)
    before = everything_in(tmp_path / "run")
    assert "optimizer.safetensors" in refused(capfd, tmp_path, config, "run.steps=6", resume=True)
    assert everything_in(tmp_path / "run") == before


def test_a_run_with_a_damaged_checkpoint_goes_on_from_the_one_before(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """There was no way out. Of three others, one is damaged, too, and is not offered."""
    more: dict[str, Any] = {"run": {"checkpoint_every_steps": 1, "keep": 9}, "lr_schedule": CONSTANT}
    config = make_config(tmp_path, store, validation={"every_steps": 2}, **more)
    assert run_here(config, f"run.dir={tmp_path / 'straight'}") == 0
    assert run_here(config, "run.steps=4") == 0
    run = tmp_path / "run"
    for step, name in ((4, "optimizer.safetensors"), (2, "model.json")):
        os.truncate(run / "checkpoints" / f"step-{step:08d}" / name, 100)
    capfd.readouterr()
    said = refused(capfd, tmp_path, config, resume=True)
    assert "has 100 bytes" in said
    assert "whole: steps 1, 3; continue from the last of them with --resume-from step-3" in said
    said = "--resume-from step-7: .* has no such checkpoint; saved: steps 1, 2, 3, 4"
    with pytest.raises(RequestError, match=said):
        run_here(config, source="step-7")
    with pytest.raises(RequestError, match="give previous, or a checkpoint of the run such as step-1200"):
        run_here(config, source="best")
    with pytest.raises(RequestError, match="has no run"):
        run_here(config, f"run.dir={tmp_path / 'new'}", source="previous")
    assert run_here(config, source="previous") == 0
    assert (
        "continues after step 3 (--resume-from previous); removed: the checkpoint of step 4" in capfd.readouterr().out
    )
    assert_same_run(tmp_path / "straight", run, 6)


def test_links_that_a_copy_has_lost_do_not_begin_a_run_again(tmp_path: Path, store: Path) -> None:
    """``--resume`` began at step 1, and removed what there was."""
    config = make_config(tmp_path, store, run={"checkpoint_every_steps": 1}, validation={"every_steps": 2})
    assert run_here(config, "run.steps=2") == 0
    latest = tmp_path / "run" / "checkpoints" / "latest"
    latest.unlink()
    assert run_here(config, "run.steps=3", resume=True) == 0
    assert {step for _, step in losses(tmp_path / "run")} == {1, 2, 3}
    target = latest.resolve()
    target.rename(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match=r"step 3 is not there; saved: steps 1, 2"):
        run_here(config, resume=True)
    latest.unlink()
    (tmp_path / "elsewhere").rename(latest)
    with pytest.raises(RequestError, match=r"latest: is a folder, not a link"):
        run_here(config, resume=True)


def test_a_run_in_use_is_said_to_be_before_its_files_are_read(tmp_path: Path, store: Path) -> None:
    """What was read meanwhile was removed, and the second start found "no such folder"."""
    config = make_config(tmp_path, store, run={"steps": 1})
    assert run_here(config) == 0
    owner = FolderOwner(tmp_path / "run", "")
    (tmp_path / "run" / "checkpoints" / "latest").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000001")
    said = rf"run: in use by process {os.getpid()} on {socket.gethostname()}; wait for it or stop it"
    with pytest.raises(RequestError, match=said):
        run_here(config, resume=True)
    with pytest.raises(RequestError, match=said):
        run_on(1, config, resume=True)
    owner.release()


def test_a_batch_is_a_batch_however_it_is_cut(tmp_path: Path, store: Path) -> None:
    """Four slides at once, in micro-batches of one, and accumulated two by two; unequal class weights."""
    splits = tmp_path / "splits.csv"
    rows = [f"slide-{n:02d},{'train' if n in (0, 1, 2, 4) else 'val' if n < 8 else ''}" for n in range(12)]
    splits.write_text("slide_id,split\n" + "\n".join(rows) + "\n")
    config = make_config(
        tmp_path,
        store,
        data={"batch_size": 4, "splits": str(splits)},
        model={"norm": "group"},
        run={"steps": 2, "precision": "float64"},
    )
    ways = {"whole": [], "micro": ["plan.microbatches=4"], "two": ["data.batch_size=2", "optimizer.accumulate=2"]}
    for name, overrides in ways.items():
        assert run_here(config, f"run.dir={tmp_path / name}", *overrides) == 0
    assert load_checkpoint(tmp_path / "whole/checkpoints/latest").model["class_weights"] != [1.0, 1.0]
    whole = weights_of(tmp_path / "whole", 2)
    for name in ("micro", "two"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "whole"), rel=1e-10)
        other = weights_of(tmp_path / name, 2)
        assert all(torch.allclose(other[key], whole[key], rtol=1e-9, atol=1e-11) for key in whole)


def test_a_run_without_validation_slides_says_so(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    splits = tmp_path / "splits.csv"
    splits.write_text("slide_id,split\n" + "".join(f"slide-{n:02d},train\n" for n in range(0, 12, 2)))
    config = make_config(tmp_path, store, data={"splits": str(splits), "class_weights": "none"}, run={"steps": 2})
    assert run_here(config) == 0
    said = capfd.readouterr().err
    assert "no training slide has class malignant" in said and "no labelled slide in 'val'" in said
    assert (tmp_path / "run" / "checkpoints" / "best").resolve().name == "step-00000002"
    assert {kind for kind, _ in losses(tmp_path / "run")} == {"train"}


def test_slides_that_an_ingest_has_not_finished_are_named(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(store, tmp_path / "stopped")
    (tmp_path / "stopped" / ".slide-99.zarr.part-0").mkdir()
    config = make_config(tmp_path, tmp_path / "stopped", run={"steps": 1})
    assert run_here(config) == 0
    said = capfd.readouterr().err
    assert "an ingest is writing them now or was stopped: slide-99; they are left out" in said


def test_bfloat16_and_few_checkpoints(tmp_path: Path, store: Path) -> None:
    config = make_config(
        tmp_path, store, run={"precision": "bfloat16", "keep": 1, "checkpoint_every_steps": 1, "steps": 5}
    )
    assert run_here(config) == 0
    run = tmp_path / "run"
    kept = {path.name for path in (run / "checkpoints").iterdir() if not path.is_symlink()}
    assert kept == {(run / "checkpoints" / link).resolve().name for link in ("latest", "best")}
    assert weights_of(run, 5)["conv1.weight"].dtype == torch.float32
    assert all(value < 5 for value in losses(run).values())


def test_weights_from_a_file(tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A head of other classes stays as it was, and what is missing is named; no code in a .pth is run."""
    config = make_config(tmp_path, store, run={"steps": 1}, optimizer={"lr": 1e-12})
    given = build_model({"name": "tests.workflows.faults:tiny", "classes": 5}).state_dict()
    del given["conv2.weight"]
    given["extra.weight"] = torch.ones(3)
    save_file(given, tmp_path / "w.safetensors")
    torch.save(given, tmp_path / "w.pth")
    for name in ("w.safetensors", "w.pth"):
        folder = tmp_path / name.replace(".", "-")
        assert run_here(config, f"model.weights={tmp_path / name}", f"run.dir={folder}") == 0
        said = capfd.readouterr().out
        assert "missing (1): conv2.weight" in said
        assert "unexpected (1): extra.weight" in said
        assert "reshaped (2): fc.weight, fc.bias" in said
        assert torch.allclose(weights_of(folder, 1)["conv1.weight"], given["conv1.weight"], atol=1e-6)
    (tmp_path / "bad.pth").write_bytes(b"cos\nsystem\n(S'touch /tmp/never'\ntR.")
    assert "bad.pth" in refused(capfd, tmp_path, config, f"model.weights={tmp_path / 'bad.pth'}")


def test_the_learning_rate_follows_its_schedule() -> None:
    def factors(**values: Any) -> list[float]:
        schedule = load_config_schedule(**values)
        return [lr_factor(schedule, 10)(step) for step in range(11)]

    assert factors(name="constant", warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors(name="linear", end_factor=0.5)[::5] == [1.0, 0.75, 0.5]
    cosine = factors(name="cosine", warmup_steps=2, end_factor=0.1)
    assert cosine[2] == 1.0 and cosine[10] == pytest.approx(0.1) and cosine[6] == pytest.approx(0.55)
    assert factors(name="step", every_steps=4, gamma=0.5) == [1.0] * 4 + [0.5] * 4 + [0.25] * 3


def load_config_schedule(**values: Any) -> Any:
    from workflows.config.learning import LrScheduleConfig

    return LrScheduleConfig(**values)


def test_the_loss_is_the_sum_of_weighted_losses_over_the_batch() -> None:
    torch.manual_seed(0)
    logits, labels, weights = torch.randn(4, 3), torch.tensor([0, 2, 1, 2]), (0.5, 2.0, 1.0)
    each = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    expected = sum(weights[y] * loss for y, loss in zip(labels.tolist(), each, strict=True)) / 4
    task = Multiclass(("label",), ("a", "b"), weights)
    assert torch.allclose(make_loss(task, 1)(logits, labels), expected)
    parts = sum(make_loss(task, 2)(logits[i : i + 2], labels[i : i + 2]) for i in (0, 2))
    assert torch.allclose(parts, expected)


@pytest.mark.soak  # test_loading.py feeds, test_validating.py validates bit for bit; test_demo.py has all roles
@pytest.mark.mpi
def test_other_ranks_feed_and_validate_as_the_trainer_itself(tmp_path: Path, store: Path, hyfi: Any) -> None:
    """Bit for bit: order, pixels, weights, validation. In processes: in threads, kernels round as they like."""
    config = make_config(tmp_path, store)
    assert run_here(config, f"run.dir={tmp_path / 'inline'}") == 0
    done = hyfi("train", config, "roles.loaders=1", "roles.validators=1", "--json", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "done"
    assert_same_run(tmp_path / "inline", tmp_path / "run", 6)


def test_more_loaders_and_validators_share_the_work(tmp_path: Path, store: Path) -> None:
    config = make_config(tmp_path, store, run={"precision": "float64"})
    grid = "plan.grids=[[1,2]]"
    assert run_on(2, config, f"run.dir={tmp_path / 'inline'}", grid) == [0, 0]
    assert run_on(6, config, grid, "roles.loaders=2", "roles.validators=2") == [0] * 6
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "inline"), rel=1e-12)


@pytest.mark.parametrize(
    "plan", [["plan.grids=[[2,2]]"], ["plan.replicas=2"], ["plan.grids=[[1,2]]", "plan.replicas=2"]]
)
def test_any_plan_computes_what_one_rank_computes(tmp_path: Path, store: Path, plan: list[str]) -> None:
    """Group norm: with batch norm, replicas have statistics of their own (as in DDP)."""
    config = make_config(tmp_path, store, model={"norm": "group"}, run={"precision": "float64"})
    assert run_here(config, f"run.dir={tmp_path / 'inline'}") == 0
    settings = load_config(config, plan)
    assert run_on(settings.ranks, config, *plan) == [0] * settings.ranks
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "inline"), rel=1e-9)
    one, other = (weights_of(tmp_path / name, 6) for name in ("inline", "run"))
    assert all(torch.allclose(other[key], one[key], rtol=1e-8, atol=1e-10) for key in one)


def test_a_run_goes_on_with_other_ranks(tmp_path: Path, store: Path) -> None:
    config = make_config(tmp_path, store, lr_schedule=CONSTANT, run={"precision": "float64"})
    assert run_here(config, f"run.dir={tmp_path / 'inline'}") == 0
    assert run_here(config, "run.steps=3") == 0
    assert run_on(4, config, *FOUR, resume=True) == [0] * 4
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "inline"), rel=1e-8)


REPLICAS, MICRO = "plan.replicas=2", "plan.microbatches=2"


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("dropping", [], [REPLICAS]),
        ("dropping", [REPLICAS], []),
        ("dropping", [MICRO], [REPLICAS, MICRO]),
        ("tiny", [MICRO], [REPLICAS]),  # batch norm: the same two images together
    ],
)
def test_a_run_goes_on_with_other_replicas_and_micro_batches(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str], model: str, before: list[str], after: list[str]
) -> None:
    """In mid-epoch, with dropout, momentum and clipping: each slide once, and the numbers of the undisturbed run."""
    config = make_config(
        tmp_path,
        store,
        data={"batch_size": 4},
        model={"name": f"tests.workflows.faults:{model}", "norm": "group" if model == "dropping" else "train"},
        lr_schedule=CONSTANT,
        run={"precision": "float64", "steps": 4},
    )
    first, second = (load_config(config, words).ranks for words in (before, after))
    assert run_on(first, config, *before, f"run.dir={tmp_path / 'straight'}") == [0] * first
    assert run_on(first, config, *before, "run.steps=2") == [0] * first
    capfd.readouterr()
    assert run_on(second, config, *after, resume=True) == [0] * second
    there, here = losses(tmp_path / "straight"), losses(tmp_path / "run")
    trained = [key for key in there if key[0] == "train"]
    assert [here[key] for key in trained] == pytest.approx([there[key] for key in trained], rel=1e-9)
    one, other = (weights_of(tmp_path / name, 4) for name in ("straight", "run"))
    learned = [key for key in one if "running" not in key and "tracked" not in key]
    assert all(torch.allclose(other[key], one[key], rtol=1e-8, atol=1e-10) for key in learned)
    said = "running statistics of batch norm, used in validation and prediction, are from step 3 on those of 2 images"
    assert (said in capfd.readouterr().err) == (model == "tiny")


def test_a_run_goes_on_with_other_micro_batches_of_live_batch_norm_and_says_so(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, store, run={"steps": 1})
    assert run_here(config) == 0
    capfd.readouterr()
    assert run_here(config, MICRO, "run.steps=2", resume=True) == 0
    said = "batch norm normalises 1 image together, 2 before (plan.replicas, plan.microbatches, plan.sync_batch_norm)"
    assert f"{said}: from step 2 on, this is not the run" in capfd.readouterr().err
    assert run_here(config, MICRO, "run.steps=3", "run.threads=1", resume=True) == 0
    assert "batch norm" not in capfd.readouterr().err


@pytest.mark.soak  # without files: tests/test_branches.py
def test_a_run_goes_on_with_planes_and_a_loader(tmp_path: Path, store: Path) -> None:
    model = {"name": "tests.test_branches:SmallInception", "options": {"dropout": 0.1}}
    config = make_config(tmp_path, store, lr_schedule=CONSTANT, model=model, run={"precision": "float64"})
    assert run_here(config, f"run.dir={tmp_path / 'inline'}") == 0
    assert run_here(config, "run.steps=3") == 0
    assert run_on(3, config, "plan.branches=2", "roles.loaders=1", resume=True) == [0] * 3
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "inline"), rel=1e-8)


def test_a_run_folder_that_only_one_node_has_is_refused(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node wrote into a folder of its own; a job that was requeued on another began anew."""
    monkeypatch.setattr("hyfi_core.comm.agreement.shared_disk._is_seen", lambda file: False)
    with pytest.raises(RequestError, match=r"run\.dir .*run: rank 0 on .*cannot see what rank 0 on"):
        run_on(2, make_config(tmp_path, store), "plan.grids=[[1,2]]")
    assert not (tmp_path / "run").exists()


def test_too_few_ranks_are_refused(tmp_path: Path, store: Path) -> None:
    with pytest.raises(RequestError, match="2 ranks were started, but the run needs 4: 2 trainers"):
        run_on(2, make_config(tmp_path, store), *FOUR)
    assert not (tmp_path / "run").exists()


def test_variables_left_over_from_a_launcher_are_named(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    config = load_config(make_config(tmp_path, store), FOUR)
    with pytest.raises(RequestError, match=r"1 ranks were started, .*left over .* `env .*-u OMPI_COMM_WORLD_SIZE "):
        check_ranks(config, 1)


def test_a_checkpoint_is_worth_afterwards_what_it_was_worth(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, store)
    assert run_here(config) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "latest"
    capfd.readouterr()
    assert validate.run(validate.EvaluationRequest(checkpoint, store, split="val", as_json=True)) == 0
    answer = json.loads(capfd.readouterr().out.splitlines()[-1])
    recorded = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "validation"][-1]
    assert (answer["step"], answer["slides"]) == (6, 4)
    assert {key: answer[key] for key in recorded if key != "kind"} == {k: v for k, v in recorded.items() if k != "kind"}
    assert validate.run(validate.EvaluationRequest(checkpoint, store, split="test", as_json=True)) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["slides"] == 2
    with pytest.raises(RequestError, match="--split"):
        validate.validate_rank(validate.EvaluationRequest(checkpoint, store, split="holdout"))


def test_validate_judges_by_the_column_of_splits_that_was_trained_by(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folds = tmp_path / "folds.csv"
    assert split.run(store / "manifest.csv", folds, 2, "case_id", "label", 0) == 0
    config = make_config(tmp_path, store, data={"splits": str(folds), "split_column": "split_1"}, run={"steps": 2})
    assert run_here(config) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "latest"
    recorded = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "validation"][-1]
    capfd.readouterr()
    request = validate.EvaluationRequest(checkpoint, store, splits=folds, split="val", as_json=True)
    assert validate.run(request) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["auroc"] == recorded["auroc"]
    assert validate.run(replace(request, split_column="split_0")) == 0
    trained_on = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert trained_on["slides"] + recorded["slides"] == len(read_table(folds, "splits").rows)
    with pytest.raises(RequestError, match=r"no column 'split_7'.*--split-column"):
        validate.validate_rank(replace(request, split_column="split_7"))


def test_an_external_test_set_has_its_own_table_column_and_no_splits(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slides that the model was trained on are named: a store that is not external at all."""
    assert run_here(make_config(tmp_path, store, run={"steps": 1})) == 0
    table = tmp_path / "external.csv"
    rows = [f"slide-{n:02d},{('benign', 'malignant')[n % 2] if n < 9 else ''}" for n in range(12)]
    table.write_text("\n".join(["slide_id,diagnosis", *rows]))
    request = validate.EvaluationRequest(tmp_path / "run" / "checkpoints" / "latest", store, labels=table, as_json=True)
    capfd.readouterr()
    assert validate.run(replace(request, target="diagnosis", split="all", out=tmp_path / "all")) == 0
    said = capfd.readouterr()
    assert json.loads(said.out.splitlines()[-1])["slides"] == 9
    with_flag = [row for row in read_table(tmp_path / "all" / "predictions.csv", "").rows if row["flags"]]
    assert [(row["slide_id"], row["flags"]) for row in with_flag] == [
        (f"slide-{n:02d}", "trained_on") for n in range(6)
    ]
    assert "trained on 6 of these slides, or on others of their cases" in (tmp_path / "all" / "index.html").read_text()
    assert "trained on 6 of these 9 slides, or on others of their cases: slide-00, slide-01" in said.err
    assert "are far from all" not in said.err
    known = read_model_json(request.checkpoint)["trained_on"]
    known["ranges"]["area_mm2"] = [area / 18 for area in known["ranges"]["area_mm2"]]
    amend_model_json(request.checkpoint, {"trained_on": known})
    asked = replace(request, target="diagnosis", splits=store / "manifest.csv")
    assert validate.run(replace(asked, split="val", out=tmp_path / "val")) == 0
    said = capfd.readouterr()
    assert json.loads(said.out.splitlines()[-1])["flagged_slides"] == {"trained_on": 0, "outside_training": 3}
    row = read_table(tmp_path / "val" / "predictions.csv", "predictions").rows[0]
    assert row["flags"] == "outside_training" and "outside_training: 18 times the area" in row["reason"]
    assert "3 of these 3 slides are far from all" in said.err and "slide-06 (18 times the area" in said.err
    table.write_text("slide_id,diagnosis\nslide-06,benign\nslide-08,benign\n")
    assert validate.run(replace(request, target="diagnosis", split="all")) == 0
    assert "all these slides are of one class: auroc and balanced accuracy are undefined" in capfd.readouterr().err
    with pytest.raises(RequestError, match="diagnosis"):
        validate.validate_rank(replace(request, split="all"))  # the column of training is not in this table


def test_what_is_written_is_yaml_that_loads(tmp_path: Path, store: Path) -> None:
    config = make_config(tmp_path, store, run={"steps": 1})
    assert run_here(config) == 0
    tree = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert tree["data"]["view"] == "pack" and tree["plan"]["replicas"] == 1


def test_a_pipeline_of_stages_trains_from_its_yaml(tmp_path: Path, store: Path) -> None:
    """The cuts that cost chose are written down, every stage saves its share, and one rank goes on from them."""
    plan = ["plan.grids=[[1,2],[1,1]]", "plan.schedule=1f1b", "plan.microbatches=2"]
    config = make_config(tmp_path, store)
    assert run_on(3, config, *plan, "run.steps=3") == [0, 0, 0]
    run = tmp_path / "run"
    assert json.loads((run / "plan.json").read_text())["cuts"] != "auto"
    folder = run / "checkpoints" / "step-00000003"
    assert len(list(folder.glob("model-*.safetensors"))) == 2
    alone = make_config(tmp_path, store, run={"dir": str(tmp_path / "alone")})
    assert run_here(alone, "plan.microbatches=2", "run.steps=3") == 0
    reference = weights_of(tmp_path / "alone", 3)
    found = load_checkpoint(folder).weights
    assert found.keys() == reference.keys()
    for name, tensor in reference.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


def test_a_checkpoint_knows_which_slides_it_was_trained_on(tmp_path: Path, store: Path) -> None:
    """Also after a resume; the slides of validation and of the test are not among them."""
    config = make_config(tmp_path, store)
    assert run_here(config, "run.steps=1") == run_here(config, "run.steps=2", resume=True) == 0
    saved = json.loads((tmp_path / "run" / "checkpoints" / "latest" / "model.json").read_text())["trained_on"]
    known = TrainedSlides.of_json(saved)
    assert [known.has(f"slide-{n:02d}", f"case-{n:02d}", "") for n in range(12)] == [True] * 6 + [False] * 6
    assert "slide-00" not in json.dumps(saved)
