"""A loss, gradient or weight that is not finite ends the run, or its step is left out; nothing of it is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from tests.workflows.archive import make_config
from tests.workflows.faults import tiny
from tests.workflows.runs import run_here, run_on
from workflows.commands import status
from workflows.config.load import load_config
from workflows.training.best import best_step
from workflows.training.checks.finite import finite_everywhere
from workflows.training.metrics_log import read_metrics

pytestmark = pytest.mark.usefixtures("in_process")
HERE = "tests.workflows.training.test_finite"


class Breaking(nn.Module):
    """A network with a counter: in its third call in training its head breaks.

    ``loss``: the logits are infinite; ``gradient``: they are finite, but not their gradient (that of a root of zero);
    ``buffer``: a buffer that nothing reads.
    """

    def __init__(self, classes: int, how: str) -> None:
        super().__init__()
        self.net, self.how = tiny(classes, norm="train"), how
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(()))
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.net(x)
        if self.training:
            self.calls += 1
        if self.how == "buffer":
            self.seen.copy_(torch.where(self.calls == 3, torch.full_like(self.seen, torch.inf), self.seen))
            return logits
        third = (self.calls == 3).to(logits.dtype)
        if self.how == "loss":
            return logits + torch.log(1 - third)
        return logits + self.scale + torch.sqrt(self.scale.square() + 1 - third)


def breaks_loss(classes: int) -> nn.Module:
    return Breaking(classes, "loss")


def breaks_gradient(classes: int) -> nn.Module:
    return Breaking(classes, "gradient")


def breaks_buffer(classes: int) -> nn.Module:
    return Breaking(classes, "buffer")


def steps(run: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"]


def links(run: Path) -> dict[str, str]:
    return {link.name: link.resolve().name for link in (run / "checkpoints").iterdir() if link.is_symlink()}


@pytest.mark.parametrize(
    ("factory", "what"),
    [("breaks_loss", "the loss is "), ("breaks_gradient", "the loss is finite, but not its gradient")],
)
@pytest.mark.parametrize(
    "plan",
    [
        [],
        ["plan.cells=[2,1]"],
        ["plan.cells=[1,2]", "plan.spill=memory"],
        ["plan.grids=[[1,2]]"],
        ["plan.grids=[[1,1],[1,1]]", "plan.cuts=[net.conv2]"],
    ],
)
def test_the_first_step_that_is_not_finite_ends_the_run(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str], factory: str, what: str, plan: list[str]
) -> None:
    config = make_config(tmp_path, store, model={"name": f"{HERE}:{factory}"}, run={"checkpoint_every_steps": 1})
    ranks = load_config(config, plan).ranks
    codes = run_on(ranks, config, *plan) if ranks > 1 else [run_here(config, *plan)]
    assert set(codes) == {1}
    run, said = tmp_path / "run", capfd.readouterr()
    assert [record["step"] for record in steps(run)] == [1, 2, 3]
    assert steps(run)[2]["nonfinite"] == ("loss" if factory == "breaks_loss" else "gradient")
    assert links(run)["latest"] == "step-00000002" and not (run / "checkpoints" / "step-00000003").exists()
    assert f"failed: step 3 (epoch 0): {what}" in said.err and said.err.count("failed: step 3") == 1
    assert "for slides slide-0" in said.err and "last finite checkpoint is" in said.err
    assert "step-00000002" in said.err and "gradients that are not finite: " in said.err
    assert status.run(run, as_json=False) == 0
    shown = capfd.readouterr().out
    assert f"{run}: failed" in shown and "step 3 (epoch 0)" in shown and "1 step with a loss or gradient" in shown


@pytest.mark.parametrize("plan", [[], ["plan.grids=[[1,1],[1,1]]", "plan.cuts=[net.conv2]"]])
def test_a_skipped_step_changes_nothing(tmp_path: Path, store: Path, plan: list[str]) -> None:
    """Weights, moments, statistics and averages after it are those before it, bit for bit; the run goes on."""
    config = make_config(
        tmp_path,
        store,
        model={"name": f"{HERE}:breaks_loss"},
        run={"on_nonfinite": "skip", "checkpoint_every_steps": 1, "keep": 9, "steps": 4, "ema": 0.9},
    )
    assert set(run_on(2, config, *plan) if plan else [run_here(config)]) == {0}
    run = tmp_path / "run"
    folders = [run / "checkpoints" / f"step-0000000{step}" for step in (2, 3)]
    from hyfi_core.runtime.checkpoint import load_checkpoint, load_training_state

    before, after = (load_checkpoint(folder) for folder in folders)
    for one, other in ((before.weights, after.weights), (before.averaged, after.averaged)):
        assert one is not None and other is not None
        assert [name for name in one if not torch.equal(one[name], other[name]) and name != "calls"] == []
    moments = [load_training_state(folder).optimizer["tensors"] for folder in folders]
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])
    # The counter is a buffer, too: it is again 3 in the next step, which is left out likewise.
    assert [record.get("skipped") for record in steps(run)] == [None, None, True, True]
    assert [record["loss"] for record in steps(run)][2:] == [None, None]
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines)


def test_weights_that_are_not_finite_are_never_saved(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """So large a rate that the second step has a loss of NaN; the run goes on, as it was asked to, and ends with 1."""
    config = make_config(
        tmp_path,
        store,
        optimizer={"lr": 1e38, "max_norm": None},
        lr_schedule={"name": "constant", "warmup_steps": 0},
        run={"steps": 4, "checkpoint_every_steps": 1, "on_nonfinite": "continue", "early_stop": 2},
    )
    assert run_here(config, "validation.every_steps=1") == 1
    run, said = tmp_path / "run", capfd.readouterr().err
    assert "failed: the weights after step 3 are not finite, and are not saved; the last finite" in said
    assert [record["step"] for record in steps(run)] == [1, 2, 3]  # two validations without improvement
    assert links(run) == {"latest": "step-00000001"}  # which is no good either
    validated = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "validation"]
    assert [record["loss"] for record in validated] == [None, None, None]


def test_a_statistic_that_overflows_ends_the_run_though_the_loss_is_finite(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, store, model={"name": f"{HERE}:breaks_buffer"}, run={"checkpoint_every_steps": 1})
    assert run_here(config, "roles.validators=0") == 1
    assert "failed: the weights after step 3 are not finite, and are not saved" in capfd.readouterr().err
    assert links(tmp_path / "run")["latest"] == "step-00000002"


def test_undefined_losses_are_never_the_best() -> None:
    records = {3: {"loss": 0.7, "auroc": 0.6}, 6: {"loss": None, "auroc": None}, 9: {"loss": None, "auroc": 0.9}}
    assert best_step(records, "auroc", records) == 3
    assert best_step(records, "auroc", [6, 9]) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_value_anywhere_is_seen_on_every_rank(bad: float, dtype: torch.dtype) -> None:
    like, alone = torch.zeros(()), AloneCommunicator()
    for length, place in ((1, 0), (7, 3), (1000, 999)):
        values = torch.randn(length).to(dtype)
        assert finite_everywhere([values, torch.arange(3)], alone, like) == 1
        values[place] = bad
        assert finite_everywhere([torch.zeros(2), values], alone, like) == 0

    def body(comm: Communicator) -> float:
        mine = torch.tensor([1.0, bad if comm.rank == 1 else 2.0], dtype=dtype)
        return float(finite_everywhere([mine], comm, like))

    assert run_ranks(3, body) == [0.0] * 3


def test_large_finite_values_are_finite_though_their_sum_is_not() -> None:
    assert finite_everywhere([torch.full((4,), 3e38)], AloneCommunicator(), torch.zeros(())) == 1
