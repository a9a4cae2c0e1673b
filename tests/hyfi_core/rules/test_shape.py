"""Space in other dims: channels-last blocks, shuffles, stacks, and heads that leave space."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.errors import RequestError
from tests.harness import assert_answers_equal_one_process, assert_equal_also_by_cells, run_copies


class ResponseNorm(nn.Module):
    """Global response normalisation on (B, H, W, C), as in ConvNeXt V2 (Woo et al., 2023)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(1, 1, 1, channels))
        self.beta = nn.Parameter(torch.rand(1, 1, 1, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        return self.gamma * (x * (size / (size.mean(-1, keepdim=True) + 1e-6))) + self.beta + x


class ChannelsLastBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up = nn.Linear(channels, 2 * channels)
        self.response = ResponseNorm(2 * channels)
        self.rms = nn.RMSNorm(2 * channels)
        self.down = nn.Linear(2 * channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.down(self.rms(self.response(F.gelu(self.up(y)))))
        return x + y.permute(0, 3, 1, 2)


class Shapes(nn.Module):
    """Every renaming of dims."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 2, 1)
        self.block = ChannelsLastBlock(8)
        self.table = nn.Parameter(torch.randn(10, 13, 8))
        self.whole = nn.LayerNorm((8, 10, 13))
        self.fc = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(self.stem(x))
        x = self.whole(x + self.table.permute(2, 0, 1))
        x = x.view(x.shape[0], 2, 4, *x.shape[2:]).transpose(1, 2).reshape(x.shape)  # channel shuffle
        first, second = x.unflatten(1, (2, 4)).unbind(1)
        pair = torch.stack([torch.tanh(first), second], 1)
        share = pair.mean((3, 4)).softmax(1)[..., None, None]
        chosen = (pair * share).sum(1)
        x = torch.cat([chosen, second.unsqueeze(0).expand(3, -1, -1, -1, -1).sum(0)], 1)
        x = x * torch.sigmoid(x.max(1, keepdim=True)[0] + x[:, 0].unsqueeze(1).squeeze(1)[:, None])
        x = (x.movedim(1, -1) @ self.fc.weight.T @ self.fc.weight).movedim(-1, 1) + x
        return self.fc(F.normalize(x, dim=1).mean((2, 3)) + x.std((2, 3)))


@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (3, 4)])
def test_space_survives_permutations_views_and_stacks(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    assert_equal_also_by_cells(Shapes(), (2, 3, 20, 26), grid)


class Profiles(nn.Module):
    """Means along one dim of space, as coordinate attention takes them (Hou et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, 2, 1)
        self.mix = nn.Conv2d(6, 6, 1)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        rows, columns = x.mean(3, keepdim=True), x.sum(-2, keepdim=True).transpose(2, 3)
        both = torch.tanh(self.mix(torch.cat([rows, columns], 2)))
        rows, columns = both.split([x.shape[2], x.shape[3]], 2)
        x = x * torch.sigmoid(rows) + columns.transpose(2, 3)
        return self.fc(torch.tanh(x.mean(-1)).mean(-1) + x.flatten(2).mean(-1))


@pytest.mark.parametrize("grid", [(2, 2), (4, 3), (7, 1)])
def test_profiles_along_one_dim_of_space(grid: tuple[int, int]) -> None:
    torch.manual_seed(2)
    assert_equal_also_by_cells(Profiles(), (2, 3, 11, 18), grid)


def test_only_the_maps_own_dims_of_one_are_squeezed() -> None:
    """Parts of one column once lost it."""
    squeezed = {"all": lambda y: y.squeeze(), "width": lambda y: y.squeeze(3), "other": lambda y: y[:, :1].squeeze()}
    assert_answers_equal_one_process(squeezed, (2, 3, 5, 11), (1, 5))


class Batchless(nn.Module):
    """Batch norms that keep nothing, and that average over all batches; a head that leaves space."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2),
            nn.BatchNorm2d(6, momentum=None),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, 2),
            nn.BatchNorm2d(6, track_running_stats=keeps, affine=False),
            nn.ReLU(),
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.LazyLinear(5), nn.BatchNorm1d(5, momentum=None), nn.ReLU(), nn.Linear(5, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize(("grid", "microbatches"), [((1, 1), 1), ((2, 2), 1), ((2, 3), 3)])
def test_batch_norms_of_other_kinds(grid: tuple[int, int], microbatches: int) -> None:
    torch.manual_seed(1)
    model = Batchless(keeps=microbatches > 1)  # what is not kept is another for each micro-batch, in prediction too
    model(torch.randn(3, 3, 21, 17))
    found = assert_equal_also_by_cells(model, (6, 3, 21, 17), grid, microbatches=microbatches)
    assert int(found.state["body.1.num_batches_tracked"]) == 1 + microbatches
    assert model.body[1].momentum is None


def test_ranks_of_a_head_hold_only_small_maps_whole() -> None:
    model = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Flatten(), nn.Linear(80 * 80, 2))

    def body(comm: Any, module: nn.Module) -> Any:
        plan = hyfi_core.ParallelPlan(grids=((1, 2),), gather_bytes=25599)
        hyfi_core.parallelize(module, (1, 3, 80, 80), plan, comm)

    # As (1, 6400) it is still a map, whose pixels a linear layer would mix.
    with pytest.raises(RequestError, match=r"linear.default in module '2' mixes the pixels.*what works"):
        run_copies(model, 2, body)


@pytest.mark.parametrize(
    ("move", "words"),
    [
        (
            lambda x: F.conv2d(x.permute(0, 2, 1, 3), torch.ones(1, 12, 1, 1)),
            r"conv2d.*height and width are dims "
            r"\(1, 3\)",
        ),
        (lambda x: F.linear(x, torch.ones(2, 9)), r"linear.*mixes the pixels of a row"),
        (lambda x: F.linear(torch.ones(4, 9), x[0, 0]), r"linear.*takes a map as a weight"),
        (lambda x: x @ torch.ones(9, 4), r"matmul.*sums over only one of height and width"),
        (lambda x: torch.einsum("bchw,bchv->bwv", x, x), r"einsum.*sums over only one of height and width"),
    ],
)
def test_what_would_mix_space_is_refused(move: Any, words: str) -> None:
    class Mixing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return move(torch.relu(x)).sum()

    def body(comm: Any, module: nn.Module) -> Any:
        plan = hyfi_core.ParallelPlan(grids=((2, 1),), gather_bytes=0)
        hyfi_core.parallelize(module, (2, 3, 12, 9), plan, comm)

    with pytest.raises(RequestError, match=words + r".*what works"):
        run_copies(Mixing(), 2, body)
