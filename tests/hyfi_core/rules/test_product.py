"""A value that is both factors of a product: once as each rank's part, once whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.lowering.lower import Target, lower
from tests.harness import assert_equal_also_by_cells

PRODUCTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all pairs of positions": lambda x: torch.einsum("bnc,bmc->bnm", x, x),
    "all pairs of channels": lambda x: torch.einsum("bnc,bnd->bcd", x, x),
    "of each image, in two dims": lambda x: torch.stack([image @ (image.mT @ image) for image in x]),
}


class OfItself(nn.Module):
    """A product of a map and itself, behind a layer that ranks share."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.first, self.last = name, nn.Conv2d(3, 4, 3, padding=1), nn.Linear(1, 3)

    def extra_repr(self) -> str:
        return self.name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = PRODUCTS[self.name](torch.tanh(self.first(x)).flatten(2).mT)
        return self.last((result * result.sin()).flatten(1).mean(1, keepdim=True))


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_a_value_with_itself_equal_one_process(name: str) -> None:
    torch.manual_seed(0)
    assert_equal_also_by_cells(OfItself(name), (2, 3, 6, 6), (2, 2), classes=3)


def test_products_of_two_dims_are_computed_on_parts() -> None:
    program = capture(OfItself("of each image, in two dims"), (2, 3, 6, 6), torch.float32)
    lower(program, Target((2, 2), 0, gather_bytes=0))  # raises if a map would have to be gathered
