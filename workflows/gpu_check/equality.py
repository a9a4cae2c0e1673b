"""Part of a check: training steps equal plain PyTorch on the same device, in float64 to rounding."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.cells.budget import held_bytes_on
from hyfi_core.models.amoebanet import amoebanet_d
from hyfi_core.models.resnet import resnet18
from workflows.benchmarks.networks import largest, networks, without_drops, worst
from workflows.gpu_check.measure_step import Row
from workflows.gpu_check.setting import CHANNELS_LAST, Setting

TOLERANCE = 1e-10
"""Largest error of gradients, relative to the norm of each, and of loss, output and buffers."""
TOLERANCE_IN_FLOAT32 = 1e-3
CLASSES = 3
GRIDS = {1: (1, 1), 2: (2, 1), 4: (2, 2)}
_STAGES = ((1, 1), (1, 1))
PLANS = {
    "pipeline": hyfi_core.ParallelPlan(grids=_STAGES, microbatches=2),
    "gems": hyfi_core.ParallelPlan(grids=_STAGES, schedule="gems_master", microbatches=2),
    "chimera": hyfi_core.ParallelPlan(grids=_STAGES, schedule="chimera", microbatches=2),
    "replicas": hyfi_core.ParallelPlan(grids=((1, 2),), replicas=2),
    "cells": hyfi_core.ParallelPlan(grids=((1, 1),), cells=(2, 3)),
    "cells, spilled": hyfi_core.ParallelPlan(grids=((1, 1),), cells=(3, 3), spill="memory"),
    "recomputed": hyfi_core.ParallelPlan(grids=_STAGES, microbatches=2, recompute=True),
    "fused halos": hyfi_core.ParallelPlan(grids=((2, 1),), fused_halo=3),
    CHANNELS_LAST: hyfi_core.ParallelPlan(grids=((2, 2),)),
}
"""Plans besides grids, by the names in ``parts.EQUAL_PLANS``."""
SPILLING_BYTES = 512 << 20
"""Memory limit of a plan that spills, beyond the process itself: so small that maps are spilled."""
BATCH = 2
"""Images of a replica."""
_THIRD_PARTY = ("monai/DenseNet121", "torchvision/densenet121", "timm/densenet121", "transformers/RegNet")


def equal(setting: Setting, what: str) -> Iterator[Row]:
    """Compare one step and one prediction with plain PyTorch, on all ranks of the job.

    Args:
        setting: The device and the sizes.
        what: The network, on a grid of all ranks; or "network/plan" for one of ``PLANS``.
    """
    comm = hyfi_core.init()
    network, _, name = what.partition("/")
    plan = PLANS[name] if name else hyfi_core.ParallelPlan(grids=(GRIDS[comm.size],))
    kind, tolerance = (torch.float32, TOLERANCE_IN_FLOAT32) if name == CHANNELS_LAST else (torch.float64, TOLERANCE)
    order = torch.channels_last if name == CHANNELS_LAST else torch.contiguous_format
    # TF32 rounds factors to 10 bits, which would hide the errors that this check is to find.
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    named = _network_of(network, setting)
    if named is None:
        yield {"what": network, "not run": f"no network of another package is installed ({', '.join(_THIRD_PARTY)})"}
        return
    title, model = named
    # Without dropout: the engine draws other random numbers than plain PyTorch.
    model = without_drops(model).train().to(setting.device, kind)
    model = model.to(memory_format=order)  # type: ignore[call-overload]  # its stubs know one of two formats
    # Copied before the engine runs, because its forward changes running statistics.
    reference = copy.deepcopy(model)
    shape = (BATCH, 3, setting.sizes.equal_px, setting.sizes.equal_px)
    images = torch.randn((BATCH * plan.replicas, *shape[1:]), dtype=torch.float64)
    images = images.to(setting.device, kind).contiguous(memory_format=order)
    labels = torch.randint(CLASSES, (BATCH * plan.replicas,)).to(setting.device)
    if plan.spill is not None:
        plan = replace(plan, memory_bytes=held_bytes_on(setting.device) + SPILLING_BYTES)
    replica = comm.rank // (comm.size // plan.replicas)
    of_replica = slice(replica * BATCH, (replica + 1) * BATCH)
    engine = hyfi_core.parallelize(model, shape, plan, comm, verify=False)
    loss = engine.accumulate(images[of_replica], labels[of_replica])
    gradients, state = engine.gather_gradients(), engine.gather_state_dict()
    logits = engine.predict(images[of_replica])
    if gradients is not None and state is not None:
        errors = _errors(reference, images, labels, plan, (loss, gradients, state, logits))
        passed = all(error <= tolerance for error in errors.values())
        title = f"{title}, {name}" if name else title
        what = title if name == CHANNELS_LAST else f"{title}, float64"
        yield {"what": f"{what}, {comm.size} x {setting.device.type}", "passed": passed, **errors}


def _network_of(network: str, setting: Setting) -> tuple[str, nn.Module] | None:
    """Return (name, network); None if no package that has such a network is installed."""
    if network == "resnet18":
        return network, resnet18(CLASSES)
    if network == "amoebanet":
        layers, filters = setting.sizes.amoebanet
        return f"AmoebaNet-D ({layers}, {filters})", amoebanet_d(CLASSES, layers, filters)
    makers = dict(networks())
    name = next((name for name in _THIRD_PARTY if name in makers), None)
    return None if name is None else (name, makers[name](setting.sizes.equal_px))


def _errors(
    reference: nn.Module, images: torch.Tensor, labels: torch.Tensor, plan: hyfi_core.ParallelPlan, results: Any
) -> dict[str, float]:
    """Return ``gradients``, ``loss``, ``buffers`` and ``output`` -> its largest error in a step of the engine.

    The reference takes the micro-batches of all replicas one after the other. Its buffers are compared as they are
    after those of replica 0, from which all replicas of the engine take their buffers.

    Args:
        reference: The model before the step; it is trained here.
        images: Of all replicas.
        labels: Of all replicas.
        plan: The plan of the step.
        results: (loss, gradients, state, logits of the first replica's images) of the engine.
    """
    loss, gradients, state, logits = results
    expected, buffers = 0.0, dict[str, torch.Tensor]()
    parts = plan.replicas * plan.microbatches
    for number, (inputs, targets) in enumerate(zip(images.chunk(parts), labels.chunk(parts), strict=True), 1):
        # Batch norm takes its statistics over each micro-batch, as it does in the engine.
        mean = F.cross_entropy(reference(inputs), targets) / parts
        torch.autograd.backward(mean)
        expected += float(mean.detach())
        # Now the reference has had the micro-batches of replica 0.
        if number == plan.microbatches:
            buffers = {name: value.clone() for name, value in reference.named_buffers()}
    differences = [
        float((state[name] - value).abs().max() / max(1.0, float(value.abs().max()))) for name, value in buffers.items()
    ]
    with torch.no_grad():
        for name, value in reference.named_buffers():
            # The output was computed with the buffers of replica 0, too.
            value.copy_(buffers[name])
        output = reference.eval()(images[:BATCH])
    return {
        "gradients": worst(gradients, {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}),
        "loss": abs(loss - expected) / max(1.0, abs(expected)),
        "buffers": largest(differences),
        "output": float((logits - output).abs().max() / max(1.0, float(output.abs().max()))),
    }
