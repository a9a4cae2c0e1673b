"""What a prediction of several micro-batches returns: what one process returns for the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hyfi_core
from tests.harness import run_copies

SHAPE = (4, 3, 16, 16)


class ManyOutputs(nn.Module):
    """Logits, and tensors that have no dim for the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.prototypes = nn.Parameter(torch.randn(2, 4, dtype=torch.float64))

    def forward(self, images: torch.Tensor) -> dict[str, Any]:
        features = self.convolution(images).mean((2, 3))
        logits = features @ self.prototypes.T
        return {"logits": logits, "prototypes": self.prototypes * 1.0, "penalty": features.square().mean(), "of": 2}


def predicted(output: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = ManyOutputs().double().eval()
    images = torch.randn(SHAPE, dtype=torch.float64)
    plan = hyfi_core.ParallelPlan(grids=((1, 2),), microbatches=2)

    def body(comm: Any, module: nn.Module) -> Any:
        return hyfi_core.parallelize(module, SHAPE, plan, comm, output=output).predict(images)

    with torch.no_grad():
        return run_copies(model, plan.ranks, body)[0], output(model(images))


@pytest.mark.parametrize(
    "output",
    [
        # As it is, and centred over the whole batch: not over each micro-batch.
        lambda out: {"logits": out["logits"], "prototypes": out["prototypes"], "of": out["of"]},
        lambda out: {"logits": out["logits"] - out["logits"].mean(0), "prototypes": out["prototypes"]},
    ],
)
def test_tensors_without_the_batch_are_not_concatenated(output: Any) -> None:
    found, wanted = predicted(output)
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_number_of_all_images_is_refused() -> None:
    with pytest.raises(hyfi_core.RequestError, match="a number for all images of a micro-batch"):
        predicted(lambda out: out)
