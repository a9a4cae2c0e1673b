"""Programs for more images are those that a capture gives, or are captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyfi_core.capture.program import Program
from hyfi_core.cost.search.resized import ResizedPrograms
from hyfi_core.models.resnet import resnet10
from tests.harness import captured_once
from tests.test_branches import SmallCells

PX = 64


class Heads(nn.Module):
    """Attention over positions: the batch is folded into other dims, and shapes are arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mixed = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 24)
        self.register_buffer("offset", torch.arange(8.0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.stem(images)
        count = maps.shape[0]
        tokens = maps.flatten(2).transpose(1, 2) + self.offset
        query, key, value = self.mixed(tokens).view(count, -1, 3, 8).unbind(2)
        found = (query @ key.transpose(1, 2)).softmax(-1) @ value
        answer: torch.Tensor = found.reshape(count * 2, -1, 8).mean(1).view(count, 2, 8).sum(2)
        return answer


class Choosy(nn.Module):
    """Does something else with many images, or with one."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.one, self.two, self.at = nn.Conv2d(3, 2, 3), nn.Conv2d(3, 2, 5), at

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        layer = self.one if images.shape[0] < self.at else self.two
        answer: torch.Tensor = layer(images).mean((2, 3))
        return answer


class Captures:
    """Captures a module, and counts how often."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.sizes = model.train(), set[int]()

    def __call__(self, images: int) -> Program:
        self.sizes.add(images)
        return captured_once(self.model, (images, 3, PX, PX), torch.float32)


class WithToken(nn.Module):
    """A token for each image is joined to its positions, as in a ViT: the 1 of its expansion may be the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.token = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.zeros(1, 8, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.stem(images)
        answer: torch.Tensor = torch.cat((self.token.expand(len(maps), -1, -1), maps.flatten(2)), 2).mean(2)
        return answer


@pytest.mark.parametrize(
    ("model", "captured"),
    [
        (resnet10(2, width=8), {1}),
        (resnet10(2, width=8, norm="group"), {1}),
        (SmallCells(), {1}),
        (Heads(), {1}),
        (WithToken(), {1, 2}),
    ],
)
def test_a_program_for_more_images_is_what_a_capture_gives(model: nn.Module, captured: set[int]) -> None:
    captures = Captures(model)
    programs = ResizedPrograms(captures)
    derived = programs(5)
    assert captures.sizes == captured
    wanted = captures(5)
    assert derived.operators == wanted.operators and derived.values == wanted.values
    assert derived.outputs == wanted.outputs and programs.as_captured(5)


def test_a_model_that_knows_its_batch_is_found_out() -> None:
    captures = Captures(Choosy(4))
    programs = ResizedPrograms(captures)
    assert programs.as_captured(3) and not programs.as_captured(4)


def test_where_two_images_are_not_like_one_what_is_derived_is_found_out() -> None:
    programs = ResizedPrograms(Captures(Choosy(2)))
    assert programs.as_captured(1) and not programs.as_captured(2) and not programs.as_captured(6)


class ChoosyTokens(WithToken):
    """Does something else with one image, and two have to be captured."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images if images.shape[0] == 1 else images.relu())


def test_where_two_captures_differ_every_size_is_captured() -> None:
    captures = Captures(ChoosyTokens())
    programs = ResizedPrograms(captures)
    assert programs(6) is captures(6) and programs(3) is captures(3) and programs.as_captured(6)
