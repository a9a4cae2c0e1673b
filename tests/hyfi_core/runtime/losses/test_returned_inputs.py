"""Models that return a parameter, a buffer or their image beside the logits, for losses that need it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import assert_equal_to_one_process
from tests.hyfi_core.runtime.losses.reference import PLANS, Net, assert_loss_of_whole_batch, classes


class Weighted(Net):
    """Two tasks whose weights in the loss are learnt; as many numbers as a micro-batch has images."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.log_variances


def uncertain(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Uncertainty weighting of a classification and a regression."""
    logits, log_variances = output
    terms = torch.stack([F.cross_entropy(logits, labels), F.mse_loss(logits[:, 0], labels.double())])
    return (terms * torch.exp(-log_variances)).sum() + log_variances.sum()


@pytest.mark.parametrize("plan", list(PLANS))
def test_a_parameter_is_returned_to_the_loss(plan: str) -> None:
    assert_loss_of_whole_batch(uncertain, classes, PLANS[plan], model=Weighted())


class Returning(Net):
    """Returns all that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.prior = nn.Buffer(torch.tensor([0.2, 0.3, 0.5]))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        return {"logits": super().forward(x), "prior": self.prior, "again": [self.prior, self.frozen], "image": x}


@pytest.mark.parametrize("grid", [(1, 1), (2, 2)])
def test_buffers_and_images_are_returned(grid: tuple[int, int]) -> None:
    def joined(output: Any) -> torch.Tensor:
        scale = output["again"][0].sum() + output["again"][1].sum() + output["image"].mean((1, 2, 3))[:, None]
        return (output["logits"] + output["prior"].log()) * scale

    assert_equal_to_one_process(Returning(), (2, 3, 11, 14), grid, classes=3, output=joined)
