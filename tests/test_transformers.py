"""Every vision network that transformers builds from a small configuration, and some of timm: exact, or refused.

``make soak`` prints the table of the walk (``pytest -s``): per network and plan whether it is exact, refused and by
which operator, or wrong.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError
from tests.small_networks import Make, build, classifiers, encoders, in_float64_throughout, of_timm, rounds_to_float32

PLANS = {
    "cells": ParallelPlan(((1, 1),), cells=(2, 2)),
    "2x2": ParallelPlan(((2, 2),)),
    "1x2": ParallelPlan(((1, 2),)),
    "two stages": ParallelPlan(((1, 1), (1, 1))),
}
ROUNDED = 8 * torch.finfo(torch.float32).eps
"""What a network in float64 may differ by, of which parts compute in float32; in float64 throughout it is exact."""
LIMIT_S = 600.0
"""What one network may take on one plan before it counts as hanging: many times what any takes."""

IMAGES = torch.randn(2, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

WALKS: dict[str, tuple[Callable[[], dict[str, Make]], int]] = {
    "classifiers": (classifiers, 30),
    "encoders": (partial(encoders, IMAGES), 30),
    "timm": (of_timm, 20),
}
"""Networks, and how many pairs of network and plan are exact at least."""


@dataclass(frozen=True)
class Step:
    """One step and one prediction.

    Attributes:
        loss: of the step.
        gradients: by parameter.
        outputs: those of evaluation.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    outputs: torch.Tensor

    def error(self, other: Step) -> float:
        """Return the largest relative difference to ``other``, the true step.

        A gradient that is zero but for rounding is compared with a thousandth of the norm of all.
        """
        norm = math.sqrt(sum(float(g.norm()) ** 2 for g in other.gradients.values()))
        errors = [abs(self.loss - other.loss) / abs(other.loss)]
        errors.append(float((self.outputs - other.outputs).norm()) / max(float(other.outputs.norm()), 1e-30))
        for name, true in other.gradients.items():
            errors.append(float((self.gradients[name] - true).norm()) / max(float(true.norm()), 1e-3 * norm))
        return max(math.inf if math.isnan(error) else error for error in errors)


def logits(out: Any) -> torch.Tensor:
    values: torch.Tensor = out if isinstance(out, torch.Tensor) else getattr(out, "logits", None)
    return out.last_hidden_state if values is None else values  # so do PP-LCNets


def by_one_process(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Step:
    model = copy.deepcopy(model)
    loss = F.cross_entropy(logits(model(images)), labels)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        return Step(float(loss), gradients, logits(model.eval()(images)))


def by_plan(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, plan: ParallelPlan) -> Step:
    copies = [copy.deepcopy(model) for _ in range(plan.ranks)]

    def body(comm: Communicator) -> Step:
        batch, channels, height, width = images.shape
        shape = (batch, channels, height, width)
        engine = hyfi_core.parallelize(copies[comm.rank], shape, plan, comm, output=logits, verify=False)
        loss = engine.accumulate(images, labels)
        return Step(float(loss), engine.gather_gradients() or {}, engine.predict(images))

    return run_ranks(plan.ranks, body, LIMIT_S)[0]


def verdicts(makes: dict[str, Make], plans: Iterable[str] = PLANS) -> Iterator[tuple[str, str, str, str]]:
    """Yield network, plan (none for what cannot be built small), verdict and reason, of all networks and plans."""
    labels = torch.tensor([0, 1])
    for name, make in makes.items():
        try:
            model = build(make, IMAGES)
        except ValueError as error:
            yield name, "", "not built", str(error)
            continue
        true = by_one_process(model, IMAGES, labels)
        if by_one_process(model, IMAGES, labels).error(true):
            yield name, "", "not built", "it draws random numbers, others than one process"
            continue
        rounds = rounds_to_float32(model, IMAGES)
        for plan in plans:
            try:
                difference = by_plan(model, IMAGES, labels, PLANS[plan]).error(true)
                wide = differs_in_float64(model, labels, plan) if rounds else difference
            except RequestError as refusal:
                yield name, plan, "refused", " ".join(str(refusal).split())
            except Exception as failure:  # dead-locked, out of time, or a fault: all are wrong
                yield name, plan, "wrong", " ".join(f"{type(failure).__name__}: {failure}".split())
            else:
                exact = wide < 1e-9 and (not rounds or difference < ROUNDED)
                said = f"{difference:.0e}" + (f", {wide:.0e} in float64 throughout" if rounds else "")
                yield name, plan, "exact" if exact else "wrong", said


def differs_in_float64(model: nn.Module, labels: torch.Tensor, plan: str) -> float:
    """Return the error of a plan if the network computes nothing in float32."""
    with in_float64_throughout(model):
        return by_plan(model, IMAGES, labels, PLANS[plan]).error(by_one_process(model, IMAGES, labels))


@pytest.mark.soak
@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("which", WALKS)
def test_every_network_is_exact_or_refused_by_name(which: str) -> None:
    makes, least = WALKS[which]
    seen = []
    for name, plan, verdict, reason in verdicts(makes()):
        print(f"{name:34} {plan:10} {verdict:9} {reason[:300]}", flush=True)
        seen.append((name, plan, verdict, reason))
    print(Counter(verdict for _, _, verdict, _ in seen))
    assert [line for line in seen if line[2] == "wrong"] == []
    assert sum(verdict == "exact" for _, _, verdict, _ in seen) >= least


@pytest.mark.parametrize(("name", "plan"), [("CLIP", "cells"), ("ViT", "2x2")])
def test_some_classifiers_are_exact(name: str, plan: str) -> None:
    makes = {name: classifiers()[name]}
    assert [line[:3] for line in verdicts(makes, [plan])] == [(name, plan, "exact")]
