"""Operators with settings drawn at random: each run equals one process, or is refused before ranks talk."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core.errors import RequestError
from tests import harness
from tests.harness import assert_equal_also_by_cells

GRIDS = [(1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (2, 3), (3, 3)]
Draw = random.Random
Build = Callable[[Draw, int], nn.Module]


class DrawnCall(nn.Module):
    """A function with its settings, which its ``repr`` shows."""

    def __init__(self, function: Callable[..., torch.Tensor], *args: Any, **settings: Any) -> None:
        super().__init__()
        self.function, self.args, self.settings = function, args, settings

    def extra_repr(self) -> str:
        return f"{getattr(self.function, '__qualname__', self.function)} {self.args} {self.settings}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.args, **self.settings)


def pair(draw: Draw, low: int, high: int) -> tuple[int, int]:
    return draw.randint(low, high), draw.randint(low, high)


def conv(draw: Draw, c: int) -> nn.Module:
    groups = draw.choice([1, 1, 2, c])
    padding = draw.choice([pair(draw, 0, 4), "valid", "same"])
    stride = (1, 1) if padding == "same" else pair(draw, 1, 3)
    mode = draw.choice(["zeros", "zeros", "reflect", "replicate", "circular"])
    dilation, bias = pair(draw, 1, 3), draw.random() < 0.5
    return nn.Conv2d(c, c, pair(draw, 1, 5), stride, padding, dilation, groups, bias, mode)


def conv_transpose(draw: Draw, c: int) -> nn.Module:
    stride, dilation = pair(draw, 1, 4), pair(draw, 1, 3)
    most = max(*stride, *dilation) - 1
    return nn.ConvTranspose2d(
        c,
        c,
        pair(draw, 1, 5),
        stride,
        pair(draw, 0, 3),
        pair(draw, 0, most),
        draw.choice([1, 2, c]),
        draw.random() < 0.5,
        dilation,
    )


def max_pool(draw: Draw, c: int) -> nn.Module:
    kernel = pair(draw, 1, 5)
    padding = (draw.randint(0, kernel[0] // 2), draw.randint(0, kernel[1] // 2))
    return nn.MaxPool2d(kernel, pair(draw, 1, 4), padding, pair(draw, 1, 2), ceil_mode=draw.random() < 0.5)


def avg_pool(draw: Draw, c: int) -> nn.Module:
    kernel = pair(draw, 1, 5)
    padding = (draw.randint(0, kernel[0] // 2), draw.randint(0, kernel[1] // 2))
    divisor = draw.choice([None, None, 7])
    return nn.AvgPool2d(kernel, pair(draw, 1, 4), padding, draw.random() < 0.5, draw.random() < 0.5, divisor)


def resize(draw: Draw, c: int) -> nn.Module:
    mode = draw.choice(["nearest", "nearest-exact", "bilinear", "bilinear"])
    settings: dict[str, Any] = {"mode": mode}
    if mode == "bilinear":
        settings["align_corners"] = draw.random() < 0.5
    if draw.random() < 0.5:
        return DrawnCall(F.interpolate, size=pair(draw, 1, 40), **settings)
    factor = tuple(draw.choice([0.4, 0.5, 0.77, 1.0, 1.3, 1.7, 2.0, 3.0]) for _ in "yx")
    return DrawnCall(F.interpolate, scale_factor=factor, **settings)


def pad(draw: Draw, c: int) -> nn.Module:
    mode = draw.choice(["constant", "reflect", "replicate"])
    low = -3 if mode == "constant" else 0
    widths = [draw.randint(low, 6) for _ in range(4)]
    if mode != "constant":
        return DrawnCall(F.pad, widths, mode)
    channels = [0, 2] if draw.random() < 0.2 else []
    return nn.Sequential(DrawnCall(F.pad, widths + channels, mode, draw.choice([0.0, -1.5])), DrawnCall(_first, c))


def _first(x: torch.Tensor, channels: int) -> torch.Tensor:
    return x[:, :channels]


def adaptive(draw: Draw, c: int) -> nn.Module:
    size = draw.choice([1, pair(draw, 1, 9), (None, draw.randint(1, 9))])
    return draw.choice([nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d])(size)


def shuffle(draw: Draw, c: int) -> nn.Module:
    return DrawnCall(_shuffled) if draw.random() < 0.5 else nn.Sequential(nn.PixelUnshuffle(2), nn.PixelShuffle(2))


def _shuffled(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def crop(draw: Draw, c: int) -> nn.Module:
    y, x = (slice(draw.randint(0, 3), draw.choice([None, -1, -2]), draw.randint(1, 3)) for _ in "yx")
    return DrawnCall(_cropped, y, x)


def _cropped(x: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
    return x[:, :, rows, columns]


class ChannelsLast(nn.Module):
    """A module over the last dim, on NCHW."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x.permute(0, 2, 3, 1))
        return x.permute(0, 3, 1, 2)


def norm(draw: Draw, c: int) -> nn.Module:
    affine, momentum = draw.random() < 0.5, draw.choice([0.1, 0.5, None])
    makers = [
        lambda: nn.BatchNorm2d(c, affine=affine, momentum=momentum),
        lambda: nn.BatchNorm2d(c, affine=affine, track_running_stats=False),
        lambda: nn.GroupNorm(draw.choice([1, 2, c]), c, affine=affine),
        lambda: nn.InstanceNorm2d(c, affine=affine),
        lambda: ChannelsLast(nn.LayerNorm(c, elementwise_affine=affine)),
        lambda: ChannelsLast(nn.RMSNorm(c, elementwise_affine=affine)),
        lambda: ChannelsLast(nn.Linear(c, c, bias=affine)),
    ]
    return draw.choice(makers)()


def gate(draw: Draw, c: int) -> nn.Module:
    return DrawnCall(draw.choice([_response, _spread, _unit, _attention]))


def _response(x: torch.Tensor) -> torch.Tensor:
    size = torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True)
    return x + x * size / (size.mean(1, keepdim=True) + 1e-6)


def _spread(x: torch.Tensor) -> torch.Tensor:
    return x / (1.0 + x.std((2, 3), correction=0, keepdim=True)) + x.var(1, keepdim=True)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return F.normalize(x, dim=1) * x.abs().mean()


def _attention(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x.mean(1, keepdim=True) + x.max(1, keepdim=True)[0]) + x.amax((2, 3), keepdim=True)


def smooth(draw: Draw, c: int) -> nn.Module:
    return draw.choice([nn.GELU, nn.SiLU, nn.Tanh, nn.Softplus, nn.ELU, nn.Hardswish, nn.LogSigmoid])()


KINDS: list[Build] = [
    conv, conv, conv_transpose, max_pool, avg_pool, resize, resize, pad, adaptive, shuffle, crop, norm, gate, smooth
]  # fmt: skip


class DrawnForward(nn.Module):
    def __init__(self, draw: Draw, channels: int, length: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 1)
        self.body = nn.Sequential(*(draw.choice(KINDS)(draw, channels) for _ in range(length)))
        self.fc = nn.Linear(channels, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(self.first(x)).mean((2, 3)))


def outcome(seed: int) -> str:
    """Run one drawn case: "impossible" in PyTorch itself, "refused" or "equal"; anything else raises."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    grid, shape = draw.choice(GRIDS), (draw.randint(1, 3), 3, draw.randint(3, 26), draw.randint(3, 26))
    model = DrawnForward(draw, 4, draw.randint(1, 3))
    harness._PROGRAMS.clear()
    try:
        with torch.no_grad():
            usual = model.double()(torch.randn(shape, dtype=torch.float64)).isfinite().all()
    except (RuntimeError, ValueError):
        return "impossible"
    if not usual:
        return "impossible"
    try:
        assert_equal_also_by_cells(model, shape, grid, seed=seed, tolerance=1e-9)
    except RequestError as error:
        assert "what works" in str(error), error
        return "refused"
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {shape} on {grid}, {model.body}: {error}") from error
    return "equal"


def run(seeds: range) -> dict[str, int]:
    found = {"equal": 0, "refused": 0, "impossible": 0}
    for seed in seeds:
        found[outcome(seed)] += 1
    return found


def test_drawn_operators_equal_one_process_or_are_refused() -> None:
    found = run(range(18))
    assert found["equal"] >= 9, found


@pytest.mark.soak
@pytest.mark.parametrize("block", range(1, 11))
def test_many_drawn_operators(block: int) -> None:
    found = run(range(100 * block, 100 * block + 60))
    assert found["equal"] >= 30, found
