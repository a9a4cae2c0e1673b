"""What forward leaves for backward: a rank keeps its own part and the strips that it got, nothing padded or twice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.comm.waits import waited
from hyfi_core.models import resnet
from hyfi_core.ops.convolution import _SavedConvolution
from hyfi_core.runtime.executor import Executor
from tests.harness import run_copies


class Kept:
    """Unique storages that autograd saves while the body runs, parameters and buffers left out."""

    def __init__(self, model: nn.Module) -> None:
        self._known: set[int] = set()
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.leave_out(model)

    def leave_out(self, model: nn.Module) -> None:
        self._known |= {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._storages[storage.data_ptr()] = storage  # held, so that its place is not taken again
        return tensor

    def during(self, body: Callable[[], Any]) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(self.add, lambda tensor: tensor):
            return body()

    @property
    def total_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


LAST = torch.channels_last


@pytest.mark.parametrize(
    ("order", "width", "side"),
    [
        (torch.contiguous_format, 4, 1024),
        (LAST, 4, 1024),
        pytest.param(LAST, 64, 2048, marks=[pytest.mark.soak, pytest.mark.timeout(1200)]),
    ],
)
def test_a_rank_of_four_keeps_a_quarter_and_its_strips(order: torch.memory_format, width: int, side: int) -> None:
    torch.manual_seed(0)
    shape = (1, 3, side, side)
    model = resnet.resnet18(2, width=width).to(memory_format=order)
    images, labels = torch.randn(shape).contiguous(memory_format=order), torch.tensor([1])
    plain = copy.deepcopy(model)
    whole = Kept(plain)
    whole.during(lambda: F.cross_entropy(plain(images), labels))
    forward = Executor.forward

    ours, strips = Kept(model), [0]

    def watched(self: Executor, values: Any, record: bool) -> Any:
        if self._comm.rank:
            return (yield from forward(self, values, record))
        records = ours.during(lambda: waited(forward(self, values, record)))
        for saved in (getattr(item, "saved", None) for item in records):
            for tensor in tensors_in(saved):
                ours.add(tensor)
            if isinstance(saved, _SavedConvolution):
                strips[0] += sum(strip.nbytes for strip in saved.strips)
        return records

    def body(comm: Any, module: nn.Module) -> None:
        if comm.rank == 0:
            ours.leave_out(module)
        plan = hyfi_core.ParallelPlan(grids=((2, 2),), fused_halo=1)
        hyfi_core.parallelize(module, shape, plan, comm).accumulate(images, labels)

    with mock.patch.object(Executor, "forward", watched):
        run_copies(model, 4, body)
    assert strips[0] > 0
    assert ours.total_bytes <= 1.05 * whole.total_bytes / 4 + strips[0]
