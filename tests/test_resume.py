"""A checkpoint knows nothing of plans: what one plan saved, any other goes on from."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.models.resnet import resnet10
from hyfi_core.runtime.checkpoint import load_checkpoint, load_training_state
from hyfi_core.runtime.saving.checkpoint_writer import CheckpointPart, CheckpointWriter
from hyfi_core.runtime.saving.optimizer_state import load_optimizer_state
from tests.harness import run_copies
from tests.steps import Factory, adamw, make_batches, sgd

SHAPE = (4, 3, 50, 45)
STEPS = 2  # before, and after: the first has moments of zero, the second uses those of the first
FIRST = ParallelPlan(((2, 2), (1, 1)), ("layer2",), 4, "1f1b")
OTHERS = {
    "1x3": ParallelPlan(((1, 3),), microbatches=4),
    "four stages": ParallelPlan(((1, 1),) * 4, ("layer1", "layer2", "layer3"), 4, "gpipe"),
    "two directions": ParallelPlan(((1, 2), (1, 1)), ("layer1",), 4, "chimera", mirror="point_to_point"),
    "one process": ParallelPlan(((1, 1),), microbatches=4),
}


def train(
    comm: Any,
    module: nn.Module,
    plan: ParallelPlan,
    factory: Factory,
    folder: Path,
    first: int,
    shape: tuple[int, ...] = SHAPE,
) -> list[float]:
    """``STEPS`` steps from ``first`` on; those that begin at 0 leave a checkpoint, others start from it, released."""
    engine = hyfi_core.parallelize(module, shape, plan, comm, optimizer=factory, release=bool(first))  # type: ignore[arg-type]
    if first:
        engine.load_state_dict(load_checkpoint(folder).weights)
        load_optimizer_state(engine.optimizer, module.named_parameters(), load_training_state(folder).optimizer)
    replica = comm.rank // plan.ranks_per_replica
    mine = slice(replica * shape[0], (replica + 1) * shape[0])
    steps = make_batches(SHAPE, 2 * STEPS, 1)[first : first + STEPS]
    losses = [engine.train_step(images[mine], labels[mine]) for ((images, labels),) in steps]
    if not first:
        share = CheckpointPart(engine.owned_state(), engine.owned_optimizer())
        writer = CheckpointWriter(comm, bool(share.weights))
        writer.begin(folder, share, step=STEPS, model={"step": STEPS}, state={"step": STEPS})
        writer.finish()
    return losses


@pytest.mark.parametrize("factory", [pytest.param(sgd, marks=pytest.mark.soak), adamw])  # AdamW has more to save
def test_any_plan_goes_on_from_what_another_saved(tmp_path: Path, factory: Factory) -> None:
    torch.manual_seed(11)
    model = resnet10(2, width=4).double()
    folder = tmp_path / "step"

    def run(plan: ParallelPlan, first: int) -> list[float]:
        body = functools.partial(train, plan=plan, factory=factory, folder=folder, first=first)
        return run_copies(model, plan.ranks, body)[0]

    run(FIRST, 0)
    assert not list(tmp_path.glob(".*"))
    wanted = run(FIRST, STEPS)
    for name, plan in OTHERS.items():
        assert run(plan, STEPS) == pytest.approx(wanted, abs=1e-10), name


PLANS = {
    "spatial ranks": ParallelPlan(((2, 2),), microbatches=4),
    "replicas": ParallelPlan(((1, 2),), microbatches=2, replicas=2),
    "stages of several ranks": ParallelPlan(((2, 1), (1, 2)), ("layer2",), 4, "1f1b"),
    "two directions": OTHERS["two directions"],
}


@pytest.mark.parametrize("saved_by", PLANS)
def test_ranks_with_the_same_weights_share_the_writing_and_any_plan_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_by: str
) -> None:
    monkeypatch.setattr("hyfi_core.runtime.saving.shares.LEAST_BYTES", 2**12)
    torch.manual_seed(11)
    model = resnet10(2, width=4).double()
    folder, plan = tmp_path / "step", PLANS[saved_by]

    def run(plan: ParallelPlan, first: int) -> list[float]:
        shape = (SHAPE[0] // plan.replicas, *SHAPE[1:])
        body = functools.partial(train, plan=plan, factory=adamw, folder=folder, first=first, shape=shape)
        return run_copies(model, plan.ranks, body)[0]

    run(plan, 0)
    shares = [load_file(file) for file in sorted(folder.glob("model-*.safetensors"))]
    assert len(shares) == (2 if saved_by == "two directions" else 4)
    assert sorted(name for share in shares for name in share) == sorted(model.state_dict())
    wanted = run(OTHERS["one process"], STEPS)
    for other in (plan, [*PLANS.values(), *PLANS.values()][[*PLANS].index(saved_by) + 1]):  # itself, and the next one
        assert run(other, STEPS) == pytest.approx(wanted, abs=1e-10), other.describe()


def test_each_stage_writes_its_own_share(tmp_path: Path) -> None:
    torch.manual_seed(11)
    model = resnet10(2, width=4).double()
    folder = tmp_path / "step"
    body = functools.partial(train, plan=FIRST, factory=sgd, folder=folder, first=0)
    run_copies(model, FIRST.ranks, body)
    shares = [load_file(folder / f"model-0000{n}-of-00002.safetensors") for n in (1, 2)]
    assert not set(shares[0]) & set(shares[1])
    assert {*shares[0], *shares[1]} == set(model.state_dict())
    assert all(name.startswith(("layer3", "layer4", "fc")) for name in shares[1])
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["fc.bias"] == "model-00002-of-00002.safetensors"
    assert index["metadata"]["total_size"] == sum(t.nbytes for share in shares for t in share.values())
