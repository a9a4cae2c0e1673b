"""What ranks send for functions of a map: ``python -m tests.hyfi_core.rules.moved > tests/hyfi_core/rules/moved.txt``.

A rule that moves too much, or gathers a map that it could leave in parts, still gives equal results. So the table of
what is moved is kept, and a change of it is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from hyfi_core.lowering.lower import Target, lower
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.rules.instructions import CollectiveCall, RankProgram
from tests.harness import Answers, captured_once
from tests.hyfi_core.rules import test_habits, test_pointwise
from tests.hyfi_core.rules.moves import test_blocks, test_place, test_strips

Tensor = torch.Tensor
GRIDS = ((2, 2), (5, 1))


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "convolution": lambda y: F.conv2d(y, ones(4, 6, 3, 3), ones(4), padding=1),
    "convolution, strides": lambda y: F.conv2d(y, ones(4, 3, 4, 2), None, (2, 1), (1, 0), (1, 2), 2),
    "convolution, same": lambda y: F.conv2d(y, ones(4, 6, 2, 5), padding="same"),
    "transposed convolution": lambda y: F.conv_transpose2d(y, ones(6, 2, 3, 4), None, 2, 1, 1),
    "maxima": lambda y: F.max_pool2d(y, 3, 2, 1, ceil_mode=True),
    "means of windows": lambda y: F.avg_pool2d(y, (2, 3), (2, 1), 1, count_include_pad=False),
    "means of cells": lambda y: F.adaptive_avg_pool2d(y, (3, 4)),
    "one mean": lambda y: F.adaptive_avg_pool2d(y, 1),
    "nearest": lambda y: F.interpolate(y, scale_factor=2, mode="nearest"),
    "bilinear": lambda y: F.interpolate(y, (13, 9), mode="bilinear"),
    "bilinear, corners": lambda y: F.interpolate(y, (5, 17), mode="bilinear", align_corners=True),
    "bicubic": lambda y: F.interpolate(y, scale_factor=1.5, mode="bicubic"),
    "smooth reduction": lambda y: F.interpolate(y, (4, 6), mode="bilinear", antialias=True),
    "padding": lambda y: F.pad(y, (2, -1, 1, 3), value=1.5),
    "reflection": lambda y: F.pad(y, (2, 1, 1, 3), "reflect"),
    "repeated border": lambda y: F.pad(y, (2, 1, 0, 3), "replicate"),
    "round the border": lambda y: F.pad(y, (2, 1, 1, 3), "circular"),
    "slice": lambda y: y[:, 1:5, 1:, 2:-1],
    "every second": lambda y: y[:, :, ::2, 1::3],
    "turned": lambda y: y.transpose(2, 3),
    "flipped": lambda y: y.flip(2).flip(3),
    "rolled": lambda y: y.roll((2, -3), (2, 3)),
    "repeated": lambda y: y.repeat(1, 2, 2, 1),
    "shuffled": lambda y: F.pixel_shuffle(torch.cat([y, y[:, :2]], 1), 2),
    "columns of windows": lambda y: F.unfold(y, 2, stride=2),
    "softmax of channels": lambda y: y.softmax(1),
    "softmax of positions": lambda y: y.flatten(2).softmax(-1),
    "norm of groups": lambda y: F.group_norm(y, 2),
    "norm of images": lambda y: F.instance_norm(y),
    "norm of batches": lambda y: F.batch_norm(y, None, None, training=True),
    "norm of layers": lambda y: F.layer_norm(y, y.shape[1:]),
    "norm of channels": lambda y: F.layer_norm(y.permute(0, 2, 3, 1), (6,)),
    "linear of channels": lambda y: F.linear(y.permute(0, 2, 3, 1), ones(4, 6)),
    "linear of rows": lambda y: F.linear(y, ones(4, 12)),
    "products of channels": lambda y: y.flatten(2) @ y.flatten(2).transpose(1, 2),
    "attention": lambda y: F.scaled_dot_product_attention(*[y.flatten(2).transpose(1, 2)] * 3),
    "lines": lambda y: F.conv1d(y.flatten(2), ones(2, 6, 3), padding=1),
    "maxima of lines": lambda y: F.max_pool1d(y.flatten(2), 2),
    "best positions": lambda y: y.flatten(2).topk(4, 2)[0],
    "a row": lambda y: y[:, :, 3],
    "a pixel": lambda y: y[:, :, 2, 5],
    "chosen positions": lambda y: y.flatten(2)[:, :, torch.tensor([0, 40, 62])],
    "all of it": lambda y: y.flatten(1).sum(1),
    "sum so far": lambda y: y.flatten(2).cumsum(2),
    "stacked": lambda y: torch.stack([y, y + 1], 2)[:, :, 1],
    "dropped": lambda y: F.dropout(y, 0.5),
    "lines, same": lambda y: F.conv1d(y.flatten(2), ones(2, 3, 4), None, 1, "same", 2, 2),
    "lines of tokens": lambda y: F.conv1d(
        y.flatten(2).transpose(1, 2).transpose(1, 2), ones(6, 1, 3), None, 1, 1, 1, 6
    ),
    "means of lines": lambda y: F.avg_pool1d(y.flatten(2), 5, 1, 2, count_include_pad=False),
    "largest of lines": lambda y: F.max_pool1d(y.flatten(2), 3, 1, 1),
    "means of all lines": lambda y: F.adaptive_avg_pool1d(y.flatten(2), 1) + F.adaptive_max_pool1d(y.flatten(2), 1),
    "largest position": lambda y: y.flatten(2).max(2)[0] + y.flatten(2).argmin(2),
    "tokens by index": lambda y: torch.index_select(y.flatten(2).transpose(1, 2), 1, torch.tensor([0, 40, 62, 7])),
    "tokens taken": lambda y: y.flatten(2).gather(2, y.flatten(2).argmax(2, keepdim=True)),
    "first and last token": lambda y: torch.cat([y.flatten(2)[:, :, :1], y.flatten(2)[:, :, -1:]], 2),
    "norms of tokens": lambda y: F.layer_norm(y.flatten(2).transpose(1, 2), (6,)).mean(1),
    "norm of flat groups": lambda y: (
        F.group_norm(y.flatten(2), 3) * F.batch_norm(y.flatten(2), None, None, training=True)
    ),
    "gated tokens": lambda y: (y.flatten(2).softmax(2) * y.flatten(2)).sum(2),
    "tokens of all images": lambda y: y.permute(0, 2, 3, 1).reshape(-1, 6) @ ones(6, 3),
    "heads": lambda y: y.flatten(2).view(2, 2, 3, -1).transpose(2, 3).softmax(3),
    "split channels": lambda y: y.split([2, 4], 1)[1] * y.chunk(3, 1)[0].mean(1, keepdim=True),
    "channels unbound": lambda y: y.unflatten(1, (2, 3)).unbind(1)[1] + y[:, 3].unsqueeze(1),
    "tiled and cut": lambda y: y.tile(1, 1, 1, 2)[..., 3:20],
    "stretched": lambda y: F.interpolate(y[:, :, :1], (9, 12), mode="nearest-exact"),
    "downs of blocks": lambda y: F.pixel_unshuffle(y[:, :, :8], 2),
    "patches": lambda y: y.unfold(2, 3, 2).unfold(3, 4, 4).mean((4, 5)),
    "spread": lambda y: y.var((2, 3)) + y.std(1).mean((1, 2))[:, None] + y.norm(dim=(2, 3)),
    "largest cells": lambda y: F.adaptive_max_pool2d(y, (3, 5)),
    "means of rows": lambda y: y.mean(2) @ ones(12, 2),
    "row means over the map": lambda y: y - y.mean(3, keepdim=True) * y.amax((2, 3), keepdim=True),
    "masked": lambda y: y.masked_fill(y > 0, 0.0) * torch.where(y > 0, y, 1.0),
}
TABLES: tuple[tuple[dict[str, Callable[[Tensor], Tensor]], tuple[int, int, int, int]], ...] = (
    (PLAIN, (2, 3, 18, 24)),
    (test_pointwise.FUNCTIONS, (2, 3, 8, 11)),
    (test_strips.FUNCTIONS, (2, 3, 8, 11)),
    (test_place.FUNCTIONS, (2, 3, 8, 11)),
    (test_habits.FUNCTIONS, test_habits.SHAPE),
    (test_blocks.FUNCTIONS, test_blocks.SHAPE),
)


def lines() -> Iterator[str]:
    """Yield a line for each function and grid."""
    yield "# What ranks receive: calls with messages of neighbours, their pixels by rank, sums; see moved.py"
    for functions, shape in TABLES:
        torch.manual_seed(0)
        program = captured_once(Answers(functions).double(), shape, torch.float64)
        for name, output in zip(functions, program.outputs, strict=True):
            for grid in GRIDS:
                ranks = range(grid[0] * grid[1])
                yield f"{name}, {grid[0]} x {grid[1]}: " + _told(
                    [lower(program, Target(grid, rank), (output,)) for rank in ranks]
                )


def _told(programs: list[RankProgram]) -> str:
    calls = [[one for one in program.instructions if isinstance(one, CollectiveCall)] for program in programs]
    moves = [[one.operator for one in of if isinstance(one.operator, Redistribute)] for of in calls]
    received = [sum(move.transfer.received_px for move in of) for of in moves]
    counts = {traffic: sum(one.traffic == traffic for one in calls[0]) for traffic in ("halo", "reduce", "stage")}
    said = [f"{count} {traffic}" for traffic, count in counts.items() if count]
    said += [" ".join(map(str, received)) + " px"] if any(received) else []
    read = [program.read_box.area for program in programs]
    said += [f"reads {' '.join(map(str, read))}"]
    said += [f"gathers {len(programs[0].gathered)}"] if programs[0].gathered else []
    return ", ".join(said)


if __name__ == "__main__":
    print("\n".join(lines()))
