"""A program for two images derived from that for one is what a capture gives, or is not derived."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hyfi_core.capture.autocast import under_autocast
from hyfi_core.cost.search.doubled import doubled
from hyfi_core.models.resnet import resnet10
from tests.harness import captured_once
from tests.hyfi_core.cost.search.test_resized import Heads
from tests.test_branches import SmallCells

PX = 32
Body = Callable[[torch.Tensor], torch.Tensor]


class Network(nn.Module):
    """A convolution, and what is done with its maps, (B, 8, 8, 8)."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 4, 4), body
        self.token = nn.Parameter(torch.zeros(1, 1, 8))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(self.stem(images)) + self.token.sum()


def with_token(maps: torch.Tensor) -> torch.Tensor:
    token = torch.zeros(1, 8, 1).expand(maps.shape[0], -1, -1)
    return torch.cat((token, maps.flatten(2)), 2).mean((1, 2))


CLEAR: dict[str, Body] = {
    "windows": lambda maps: maps.view(maps.shape[0], 8, 2, 4, 2, 4).permute(0, 2, 4, 1, 3, 5).reshape(-1, 8, 16),
    "slices of space": lambda maps: torch.cat((maps[:, :, 1:], maps[:, :, :1]), 2),
    "shifted": lambda maps: maps.roll(2, 3) + maps.flip(2),
    "halves of channels": lambda maps: torch.stack(maps.chunk(2, 1), 1),
}
UNCLEAR: dict[str, Body] = {
    "token": with_token,
    "a view of one, a copy of two": lambda maps: maps.permute(0, 2, 3, 1).reshape(-1, 8),
    "counted": lambda maps: maps + torch.arange(maps.shape[0]).view(-1, 1, 1, 1),
    "the first": lambda maps: maps[:1] * maps,
    "batch behind": lambda maps: maps.transpose(0, 1).reshape(8, -1),
    "batch not in front": lambda maps: maps.transpose(0, 1).reshape(8, maps.shape[0], 64),
    "squeezed": lambda maps: maps.sum((2, 3)).squeeze(),
    "others of the batch": lambda maps: maps.repeat(maps.shape[0], 1, 1, 1),
    "filled": lambda maps: maps + maps.new_ones((maps.shape[0], 8, 1, 1)),
}


@pytest.mark.parametrize("model", [resnet10(2, width=8), resnet10(2, width=8, norm="group"), SmallCells(), Heads()])
def test_networks_for_two_images_are_what_a_capture_gives(model: nn.Module) -> None:
    single, two = (captured_once(model.train(), (images, 3, 64, 64), torch.float32) for images in (1, 2))
    derived = doubled(single)
    assert derived is not None
    assert derived.operators == two.operators and derived.values == two.values and derived.outputs == two.outputs


@pytest.mark.parametrize("body", CLEAR.values(), ids=CLEAR)
def test_what_keeps_the_batch_in_front_is_derived(body: Body) -> None:
    single, two = (captured_once(Network(body), (images, 3, PX, PX), torch.float32) for images in (1, 2))
    derived = doubled(single)
    assert derived is not None
    assert derived.digest() == two.digest()


@pytest.mark.parametrize("body", UNCLEAR.values(), ids=UNCLEAR)
def test_where_a_one_may_be_the_batch_nothing_is_derived(body: Body) -> None:
    assert doubled(captured_once(Network(body), (1, 3, PX, PX), torch.float32)) is None


def test_dtypes_of_autocast_stay() -> None:
    single, two = (
        under_autocast(
            captured_once(resnet10(2, width=8).train(), (images, 3, 64, 64), torch.float32), torch.bfloat16, "cpu"
        )
        for images in (1, 2)
    )
    derived = doubled(single)
    assert derived is not None and derived.values == two.values


def test_only_a_program_for_one_image_is_doubled() -> None:
    assert doubled(captured_once(Network(lambda maps: maps.relu()), (2, 3, PX, PX), torch.float32)) is None
