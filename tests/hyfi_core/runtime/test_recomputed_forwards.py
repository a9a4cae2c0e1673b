"""Forwards that are computed again: what the first run does not keep, and does not compute.

Parts of the image are read again from a tensor, and kept of what may be slow or different.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.models import resnet
from hyfi_core.ops.window_places import WindowPlaces
from hyfi_core.plan.box import Box
from hyfi_core.runtime import batch_reader

SIDE = 64
PLAN = hyfi_core.ParallelPlan(((1, 1),), cells=(2, 2), interleave=3, recompute=True)


def parts_alive(
    images: torch.Tensor | Callable[[Box], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int, torch.Tensor]:
    """Return how many parts of the image exist while the loss is computed, how many were read, and a gradient."""
    read: list[StorageWeakRef] = []
    plain, alive = batch_reader.read_part, []

    def noted(*args: object) -> torch.Tensor:
        part = plain(*args)  # type: ignore[arg-type]
        read.append(StorageWeakRef(part.untyped_storage()))
        return part

    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        alive.append(sum(not part.expired() for part in read))
        return F.cross_entropy(output, labels)

    monkeypatch.setattr(batch_reader, "read_part", noted)
    torch.manual_seed(0)
    model = resnet.resnet10(2, width=4).double()
    engine = hyfi_core.parallelize(model, (1, 3, SIDE, SIDE), PLAN, AloneCommunicator(), loss=loss, verify=False)
    read.clear()
    alive.clear()
    engine.accumulate(images, torch.tensor([1]))
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return alive[0], len(read), gradient


def test_a_tensor_is_read_again_and_a_function_once(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(1, 3, SIDE, SIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    of_tensor = parts_alive(images, monkeypatch)
    of_function = parts_alive(lambda box: images[(slice(None), slice(None), *box.slices())].clone(), monkeypatch)
    assert of_tensor[:2] == (0, 8), "no cell keeps its part, and each reads it twice"
    assert of_function[:2] == (4, 4), "each cell keeps its part"
    assert torch.equal(of_tensor[2], of_function[2])


def test_indices_of_maxima_are_put_into_a_byte_where_a_backward_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrowed(plan: hyfi_core.ParallelPlan) -> int:
        shapes = []
        plain = WindowPlaces.narrow

        def noted(places: WindowPlaces, indices: torch.Tensor) -> torch.Tensor:
            shapes.append(indices.shape)
            return plain(places, indices)

        model = resnet.resnet10(2, width=4)
        engine = hyfi_core.parallelize(model, (1, 3, SIDE, SIDE), plan, AloneCommunicator(), verify=False)
        with monkeypatch.context() as patch:
            patch.setattr(WindowPlaces, "narrow", noted)
            engine.accumulate(torch.randn(1, 3, SIDE, SIDE), torch.tensor([1]))
        # Not those of bands at borders between cells.
        return sum(min(shape[2:]) > 1 for shape in shapes)

    assert narrowed(PLAN) == narrowed(hyfi_core.ParallelPlan(((1, 1),), cells=(2, 2))) == 4
