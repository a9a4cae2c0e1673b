"""Entries of channels picked, repeated and overwritten, and slices of space overwritten: as one process, in parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from hyfi_core.capture.export import capture
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import Target, lower
from tests.harness import Answers, assert_answers_equal_one_process

Tensor = torch.Tensor
SHAPE = (2, 3, 8, 11)  # a map of 4 x 6: on five rows of ranks one owns nothing


def put(*index: slice | list[int], source: Callable[[Tensor], Tensor | float]) -> Callable[[Tensor], Tensor]:
    def function(y: Tensor) -> Tensor:
        result = y * 1.5
        result[index] = source(y)
        return result

    return function


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda y: y[:, [2, 0]] + y[:, torch.tensor([[1, 1], [0, 5]])].sum(1),
    "index of two dims": lambda y: y[[0, 1, 1], [5, 0, 2]],
    "index of dims apart": lambda y: y.unflatten(1, (2, 3)).permute(0, 1, 3, 4, 2)[[1, 0], :, :, :, [1, 2]],
    "index_select": lambda y: y.index_select(1, torch.tensor([2, 0])),
    "repeat": lambda y: y.repeat(1, 2, 1, 1),
    "repeat of images": lambda y: y.repeat(2, 1, 1, 1, 1),
    "tile": lambda y: y.tile(2, 1, 1),
    "repeat_interleave": lambda y: y.repeat_interleave(2, 1),
    "pixels repeated": lambda y: y.repeat_interleave(2, 2).repeat_interleave(3, 3),
    "channel_shuffle": lambda y: F.channel_shuffle(y, 3),
    "diagonal": lambda y: torch.diagonal(y.unflatten(1, (2, 3)), dim1=1, dim2=2),
    "put channels": put(slice(None), slice(0, 2), source=lambda y: y[:, 2:4]),
    "put channels one by one": put(slice(None), [3, 0], source=lambda y: y[:, 1:3]),
    "put one number": put(slice(None), [3, 0], source=lambda y: 2.0),
    "put a box": put(slice(None), slice(None), slice(1, 3), slice(2, 6), source=lambda y: 0.5),
    "put rows of rows": put(slice(None), slice(None), slice(0, None, 2), source=lambda y: y[:, :, 1::2]),
    "put a column": put(..., slice(3, 4), source=lambda y: y.mean(3, keepdim=True)),
    "put a table": put(..., slice(1, 5), source=lambda y: torch.arange(4.0).double()),
    "gather": lambda y: y.gather(1, y.argsort(1)) + y.sort(1)[0],
    "scatter": lambda y: torch.zeros_like(y).scatter(1, y.argmax(1, keepdim=True), y[:, 1:2]),
    "scatter_add": lambda y: (y * 0).scatter_add(1, y.argmax(1, keepdim=True).expand(-1, 6, -1, -1), y),
    "filled": lambda y: y.new_full(y.shape, 2.5) * y + y.new_zeros(y.shape),
    "filled without space": lambda y: y.new_full((2, 6, 1, 1), 2.5) * y + y.new_ones(1),
    "one_hot": lambda y: F.one_hot(y.argmin(1), 6).permute(0, 3, 1, 2) * y,
    "topk": lambda y: y.topk(3, 1)[0] + y.median(1, keepdim=True)[0],
}


@pytest.mark.parametrize("grid", [(1, 2), (2, 2), (5, 1)])
def test_entries_equal_one_process(grid: tuple[int, int]) -> None:
    assert_answers_equal_one_process(FUNCTIONS, SHAPE, grid)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            lambda y: y[:, :, [2, 0]],
            r"index.Tensor indexes dims \[2\] of a map whose height and width are dims \(2, "
            r"3\)",
        ),
        (lambda y: y.gather(2, y.argsort(1).clamp(max=3)[:, :, :2]), "gather.default combines a map"),
        (lambda y: y * y.argmax(), "argmax.default works on the flattened tensor, across all dims"),
        (lambda y: y.repeat_interleave(2), "repeat_interleave.self_int works on the flattened tensor"),
        (lambda y: y.repeat(1, 2, 2, 1), "repeat.default repeats height and width"),
        (lambda y: torch.zeros(2, 6, 4, 6)[:, :2].index_put((torch.tensor([0]),), y[:1, :2]), "writes a map into"),
    ],
)
def test_pixels_picked_by_number_are_refused_by_name(function: Callable[[Tensor], Tensor], said: str) -> None:
    program = capture(Answers({"": function}), SHAPE, torch.float32)
    with pytest.raises(RequestError, match=said):
        lower(program, Target((2, 2), 0, gather_bytes=0))
