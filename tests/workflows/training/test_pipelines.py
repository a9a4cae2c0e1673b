"""Runs of several stages, whose trainers keep only their own: they train, resume and validate as one rank does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hyfi_core import initial_weights
from hyfi_core.errors import RequestError
from hyfi_core.runtime.checkpoint import load_checkpoint
from hyfi_core.runtime.parallelize import parallelize
from tests.workflows.archive import make_config, make_store
from tests.workflows.faults import tiny
from tests.workflows.runs import losses, run_here, run_on
from workflows.training import start

pytestmark = pytest.mark.usefixtures("in_process")
TWO_STAGES = ("plan.grids=[[1,1],[1,1]]", "plan.cuts=[norm1]")


@pytest.mark.parametrize("validators", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_resumed_pipeline_is_that_of_one_rank(
    validators: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With initial weights from a file, a moving average, a step that was not validated before the run stopped."""
    torch.manual_seed(1)
    weights = tiny(classes=2, norm="group").double().state_dict()
    save_file({name: value.contiguous() for name, value in weights.items()}, tmp_path / "weights.safetensors")
    config = make_config(
        tmp_path,
        make_store(tmp_path),
        model={
            "name": "tests.workflows.faults:tiny",
            "norm": "group",
            "weights": str(tmp_path / "weights.safetensors"),
        },
        plan={"microbatches": 2},
        lr_schedule={"name": "constant"},
        validation={"every_steps": 1},
        run={"precision": "float64", "ema": 0.7, "keep": 9},
    )
    held: list[set[str]] = []

    def watched(model: torch.nn.Module, *given: Any, **settings: Any) -> Any:
        engine = parallelize(model, *given, **settings)
        held.append({name for name, tensor in model.state_dict().items() if not tensor.is_meta})
        return engine

    monkeypatch.setattr(start, "parallelize", watched)
    assert run_here(config, f"run.dir={tmp_path / 'one'}", "run.steps=4") == 0
    assert run_on(2, config, *TWO_STAGES, "run.steps=2") == [0, 0]
    (tmp_path / "weights.safetensors").unlink()  # a checkpoint has all that a resumed run needs
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    assert '"validation"' in lines[-1]
    metrics.write_text("".join(lines[:-1]))
    with_validator = ["roles.validators=1"] if validators else []
    ranks = 2 + len(with_validator)
    assert run_on(ranks, config, *TWO_STAGES, *with_validator, "run.steps=4", resume=True) == [0] * ranks
    assert len(held) == 5 and held[0] == set(weights)
    for first, second in (sorted(held[1:3], key=len), sorted(held[3:5], key=len)):
        assert first | second == set(weights) and not first & second
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
    found, wanted = (load_checkpoint(tmp_path / name / "checkpoints" / "latest") for name in ("run", "one"))
    for here, there in ((found.weights, wanted.weights), (found.averaged, wanted.averaged)):
        assert here is not None and there is not None and here.keys() == there.keys()
        assert all(torch.allclose(here[name], there[name], rtol=1e-8, atol=1e-10) for name in here)


def test_trainers_of_a_built_in_model_draw_the_weights_of_their_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []
    forget = initial_weights._forgotten
    monkeypatch.setattr(
        initial_weights, "_forgotten", lambda tensor: (forgotten.append(str(tensor.shape)), forget(tensor))[1]
    )
    model = {"name": "resnet6", "norm": "group", "options": {"width": 4}}
    run = {"precision": "float64", "steps": 2}
    config = make_config(tmp_path, make_store(tmp_path), model=model, plan={"microbatches": 2}, run=run)
    assert run_here(config, f"run.dir={tmp_path / 'one'}") == 0
    assert not forgotten
    assert run_on(2, config, "plan.grids=[[1,1],[1,1]]", "plan.cuts=[layer2]") == [0, 0]
    assert forgotten
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
    found, wanted = (load_checkpoint(tmp_path / name / "checkpoints" / "latest") for name in ("run", "one"))
    assert all(torch.allclose(found.weights[name], wanted.weights[name], rtol=1e-8) for name in wanted.weights)
    assert run_on(2, config, "plan.grids=[[1,1],[1,1]]", "plan.cuts=[layer2]", "run.steps=3", resume=True) == [0, 0]
    assert run_here(config, f"run.dir={tmp_path / 'one'}", "run.steps=3", resume=True) == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)


def test_weights_that_one_rank_refuses_are_refused_by_all(tmp_path: Path) -> None:
    save_file({"other": torch.zeros(1)}, tmp_path / "weights.safetensors")
    model = {"name": "tests.workflows.faults:tiny", "weights": str(tmp_path / "weights.safetensors")}
    config = make_config(tmp_path, make_store(tmp_path), model=model, plan={"microbatches": 2})
    with pytest.raises(RequestError, match="none of its 1 tensors matches the model"):
        run_on(2, config, *TWO_STAGES)
