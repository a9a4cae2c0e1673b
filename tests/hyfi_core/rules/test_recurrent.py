"""Recurrent layers over pooled values, over rows of a map, or over all of its positions, in order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.errors import RequestError
from tests.harness import assert_equal_also_by_cells, assert_equal_to_one_process, run_copies

HEADS: dict[str, tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]] = {
    "LSTM over positions": (nn.LSTM(4, 3, batch_first=True, bidirectional=True), lambda y: y.flatten(2).mT),
    "GRU over rows": (nn.GRU(4, 6, 2, batch_first=True), lambda y: y.mean(3).mT),
    "RNN over a pooled map": (nn.RNN(4, 6, batch_first=True), lambda y: F.adaptive_avg_pool2d(y, 2).flatten(2).mT),
}


class Recurrent(nn.Module):
    """A small network whose head is a recurrent layer."""

    def __init__(self, name: str, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.stem, self.norm = nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4)
        self.recurrent = copy.deepcopy(HEADS[name][0])
        self.recurrent.dropout = dropout
        self.last = nn.Linear(6, 2)

    def extra_repr(self) -> str:
        return self.name

    def forward(self, x: torch.Tensor) -> Any:
        sequence = HEADS[self.name][1](torch.relu(self.norm(self.stem(x))))
        return self.last(self.recurrent(sequence)[0].mean(1))


@pytest.mark.parametrize("name", HEADS)
def test_recurrent_heads_equal_one_process(name: str) -> None:
    assert_equal_also_by_cells(Recurrent(name), (2, 3, 9, 12), (2, 2))


def test_the_model_is_captured_once_and_can_still_be_called() -> None:
    """A recurrent layer lists its parameters again; neither capture nor an optimizer step changes the model's state."""
    images, labels = torch.randn(2, 3, 9, 12, dtype=torch.float64), torch.tensor([0, 1])

    def body(comm: Any, model: nn.Module) -> int:
        sgd: Any = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
        engine = hyfi_core.parallelize(
            model, tuple(images.shape), ParallelPlan(grids=((1, 2),)), comm, optimizer=sgd, verify=False
        )
        for _ in range(2):
            engine.train_step(images, labels)
        wanted = model.eval()(images)
        torch.testing.assert_close(engine.predict(images), wanted.detach(), rtol=1e-12, atol=1e-12)
        return len(engine._subject.programs)  # one to train, one to predict

    assert run_copies(Recurrent("LSTM over positions").double(), 2, body) == [2, 2]


@pytest.mark.filterwarnings("ignore:dropout option adds dropout after all but last")
def test_a_single_layer_has_no_dropout_behind_it() -> None:
    """PyTorch warns of it and draws nothing, so any ranks compute the same."""
    model = Recurrent("LSTM over positions", dropout=0.5)
    assert model.recurrent.num_layers == 1
    assert_equal_to_one_process(model, (2, 3, 9, 12), (1, 2))


def test_dropout_between_layers_on_several_ranks_is_refused() -> None:
    model = Recurrent("GRU over rows", dropout=0.5)

    def body(comm: Any, module: nn.Module) -> None:
        with pytest.raises(RequestError, match="'recurrent' draws random numbers"):
            hyfi_core.parallelize(module, (2, 3, 9, 12), ParallelPlan(grids=((1, 2),)), comm, verify=False)

    run_copies(model, 2, body)
