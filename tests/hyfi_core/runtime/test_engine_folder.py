"""Saving an engine under one plan and going on under another equals one undisturbed run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hyfi_core
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.harness import run_copies

SHAPE = (2, 3, 12, 14)
PLANS = {
    "alone": ParallelPlan(((1, 1),), microbatches=2),
    "parts": ParallelPlan(((1, 2),), microbatches=2),
    "stages": ParallelPlan(((1, 1), (1, 1)), ("stem",), 2),
}


class Drawing(nn.Module):
    """Dropout, batch norm, a frozen layer, and a centre that training changes and the ``state_dict`` leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.3))
        self.body = nn.Sequential(nn.Conv2d(6, 6, 3, 1, 1), nn.GroupNorm(2, 6), nn.ReLU())
        self.head = nn.Linear(6, 3)
        self.stem[0].bias.requires_grad_(False)  # type: ignore[union-attr]
        self.register_buffer("centre", torch.zeros(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.body(self.stem(x)).mean((2, 3))
        if self.training:
            self.centre.mul_(0.9).add_(0.1 * features.detach().mean(0))
        return self.head(features - self.centre)


def made(comm: Any, module: nn.Module, plan: ParallelPlan) -> tuple[Any, Any]:
    engine = hyfi_core.parallelize(
        module, SHAPE, plan, comm, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
    )
    return engine, torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, 5)


def train(engine: Any, schedule: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(SHAPE, dtype=torch.float64, generator=generator)
        losses.append(engine.accumulate(images, torch.tensor([step % 3, 1])))
        engine.update(max_norm=1.0)
        schedule.step()
    return losses


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Drawing().double()


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    def body(comm: Any, module: nn.Module) -> Any:
        torch.manual_seed(3)  # the key of dropout
        engine, schedule = made(comm, module, PLANS["alone"])
        return train(engine, schedule, range(5)), engine.gather_state_dict(), engine.predict(torch.ones(SHAPE).double())

    return run_copies(model(), 1, body)[0]


@pytest.mark.parametrize(("first", "then"), [("parts", "stages"), ("stages", "alone"), ("alone", "parts")])
def test_any_plan_goes_on_where_any_plan_has_saved(first: str, then: str, undisturbed: Any, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "saved"

    def begin(comm: Any, module: nn.Module) -> Any:
        torch.manual_seed(3)
        engine, schedule = made(comm, module, PLANS[first])
        losses = train(engine, schedule, range(2))
        engine.save(folder)
        losses += train(engine, schedule, range(2, 3))
        engine.save(folder, extra={"schedule": schedule.state_dict(), "step": 3})  # replaces the first
        return losses

    def go_on(comm: Any, module: nn.Module) -> Any:
        torch.manual_seed(77)
        engine, schedule = made(comm, module, PLANS[then])
        train(engine, schedule, range(9, 10))  # what is loaded replaces all of it
        extra = engine.load(str(folder))
        schedule.load_state_dict(extra["schedule"])
        losses = train(engine, schedule, range(extra["step"], 5))
        # Ranks are threads here, and a capture by one tells the optimizers of all that they are being compiled: AdamW
        # would then compute with its counters in float32. So no rank predicts before all have updated.
        comm.barrier()
        return losses, engine.gather_state_dict(), engine.predict(torch.ones(SHAPE).double())

    losses, state, logits = undisturbed
    begun = run_copies(model(), PLANS[first].ranks, begin)[0]
    continued, found, answer = run_copies(model(1), PLANS[then].ranks, go_on)[0]
    assert [*begun, *continued] == pytest.approx(losses, rel=1e-10)
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(answer, logits, rtol=1e-9, atol=1e-11)
    assert not [path for path in folder.parent.iterdir() if path != folder]


def test_the_weights_are_safetensors_under_the_users_names(tmp_path: Path) -> None:
    def body(comm: Any, module: nn.Module) -> Any:
        engine, schedule = made(comm, module, PLANS["alone"])
        train(engine, schedule, range(1))
        engine.save(tmp_path / "saved")
        return engine.gather_state_dict()

    (state,) = run_copies(model(), 1, body)
    found = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(found) == set(model().state_dict()) and all(torch.equal(found[name], state[name]) for name in found)


def test_buffers_that_the_state_dict_leaves_out_are_named_at_start() -> None:
    def body(comm: Any, module: nn.Module) -> list[str]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            made(comm, module, PLANS["alone"])
            hyfi_core.parallelize(module, SHAPE, PLANS["alone"], comm)  # does not train
        return [str(one.message) for one in said if "persistent" in str(one.message)]

    ((said,),) = run_copies(model(), 1, body)
    assert "'centre' changes in training" in said


class Wider(Drawing):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)


@pytest.mark.parametrize("case", ["missing", "other files", "other model", "not JSON", "no optimizer", "two folders"])
def test_wrong_folders_are_refused_alike_on_every_rank(case: str, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("not yours to replace")

    def body(comm: Any, module: nn.Module) -> str:
        engine, _ = made(comm, module, PLANS["stages"])
        with pytest.raises(RequestError) as told:
            if case == "missing":
                engine.load(tmp_path / "nowhere")
            elif case == "other files":
                engine.save(tmp_path / "notes")
            elif case == "not JSON":
                engine.save(tmp_path / "saved", extra={"schedule": object()})
            elif case == "two folders":
                engine.save(tmp_path / f"rank-{comm.rank}")
            elif case == "other model":
                engine.save(tmp_path / "saved")
                torch.manual_seed(0)
                made(comm, Wider().double(), PLANS["stages"])[0].load(tmp_path / "saved")
            else:
                reader = hyfi_core.parallelize(module, SHAPE, PLANS["stages"], comm)
                reader.save(tmp_path / "saved")
                reader.load(tmp_path / "saved")
                engine.load(tmp_path / "saved")
        return str(told.value)

    (said,) = set(run_copies(model(), 2, body))
    wanted = {
        "missing": "no such folder",
        "other files": "is not a checkpoint",
        "other model": "'head.weight' is (3, 6) in the checkpoint, (4, 6) in the model",
        "not JSON": "extra cannot be saved as JSON",
        "no optimizer": "has no optimizer",
        "two folders": "the folder to save to is",
    }
    assert wanted[case] in said
    assert (tmp_path / "notes" / "mine.txt").read_text() == "not yours to replace"
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_is_told_on_every_rank_and_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    def body(comm: Any, module: nn.Module) -> str:
        engine, _ = made(comm, module, PLANS["stages"])
        engine.save(tmp_path / "saved", extra={"step": 1})
        comm.barrier()
        if comm.rank == 0:
            monkeypatch.setattr("hyfi_core.runtime.saving.checkpoint_writer.write_tensors", full)
        comm.barrier()
        with pytest.raises(OSError, match="No space left"):
            engine.save(tmp_path / "saved", extra={"step": 2})
        comm.barrier()
        return str(engine.load(tmp_path / "saved")["step"])

    assert set(run_copies(model(), 2, body)) == {"1"}


@pytest.mark.parametrize(("before", "after"), [("alone", "stages"), ("parts", "alone"), ("stages", "parts")])
def test_gradients_accumulated_so_far_are_saved(before: str, after: str, tmp_path: Path) -> None:
    batches = [torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(3)]

    def some(engine: Any, numbers: range) -> None:
        for number in numbers:
            engine.accumulate(batches[number], torch.tensor([number % 3, 1]))

    def undisturbed(comm: Any, module: nn.Module) -> Any:
        engine, _ = made(comm, module, PLANS["alone"])
        some(engine, range(3))
        return engine.update(max_norm=1.0), engine.gather_state_dict()

    def saving(comm: Any, module: nn.Module) -> None:
        engine, _ = made(comm, module, PLANS[before])
        some(engine, range(2))
        engine.save(tmp_path / "saved")

    def resumed(comm: Any, module: nn.Module) -> Any:
        engine, _ = made(comm, module, PLANS[after])
        some(engine, range(1))  # what this engine has accumulated gives way
        engine.load(tmp_path / "saved")
        some(engine, range(2, 3))
        return engine.update(max_norm=1.0), engine.gather_state_dict()

    torch.manual_seed(3)  # the key of dropout, which is saved, too
    norm, state = run_copies(model(), 1, undisturbed)[0]
    torch.manual_seed(3)
    run_copies(model(), PLANS[before].ranks, saving)
    found_norm, found = run_copies(model(5), PLANS[after].ranks, resumed)[0]
    assert found_norm == pytest.approx(norm, rel=1e-9)
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10)
