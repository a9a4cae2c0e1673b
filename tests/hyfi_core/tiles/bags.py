"""Small encoders, aggregators and bags of tiles, and the reference: one process, one graph over all tiles."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import hyfi_core
from hyfi_core.comm.threads import run_ranks
from hyfi_core.tiles.keyed_draws import DrawKey, KeyedDraws

TILE_PX = 16
WIDTH = 12


class SmallViT(nn.Module):
    """Patches of 8 pixels, two blocks of attention with dropout and drop-path, a class token."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.unused = nn.Linear(WIDTH, 2)  # a head that features do not need
        self.path = dropout

    def forward(self, tiles: torch.Tensor) -> Any:
        x = self.patches(tiles).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            y = block(x) - x
            if self.training and self.path:
                y = y * x.new_empty(len(x), 1, 1).bernoulli_(1 - self.path) / (1 - self.path)
            x = x + y
        return {"cls": x[:, 0], "patches": x[:, 1:]}


def token(returned: Any) -> Any:
    return returned["cls"]


def small_cnn() -> nn.Module:
    """Two convolutions with batch norms."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, WIDTH, 3, 2, 1), nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.Dropout2d(0.2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


class SmallResNet(nn.Module):
    """A convolution and two residual blocks with batch norms, the second with a stride; dropout before the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(8, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
            )
            for width, stride in ((8, 1), (WIDTH, 2))
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(8, WIDTH, 1, 2, bias=False), nn.BatchNorm2d(WIDTH))
        self.drop = nn.Dropout2d(0.2)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        x = self.stem(tiles)
        x = (self.branches[0](x) + x).relu()
        x = (self.branches[1](x) + self.shortcut(x)).relu()
        return self.drop(x).mean((2, 3))


def convnext() -> nn.Module:
    """ConvNeXt of transformers with stochastic depth."""
    from transformers import ConvNextConfig, ConvNextModel

    return ConvNextModel(
        ConvNextConfig(num_stages=2, hidden_sizes=[8, WIDTH], depths=[1, 1], drop_path_rate=0.3, patch_size=4)
    )


def dinov2() -> nn.Module:
    """Dinov2 of transformers with dropout and stochastic depth."""
    from transformers import Dinov2Config, Dinov2Model

    return Dinov2Model(
        Dinov2Config(hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, image_size=TILE_PX, patch_size=8,
                     hidden_dropout_prob=0.1, drop_path_rate=0.2)
    )  # fmt: skip


def pooled(returned: Any) -> Any:
    return returned.pooler_output


class Attention(nn.Module):
    """Gated attention with dropout and coordinates, ``(N, D)``; returns (logits, attention)."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.score, self.place = nn.Linear(WIDTH, 1), nn.Linear(2, 1)
        self.drop, self.classify = nn.Dropout(0.3), nn.Linear(WIDTH, classes)

    def forward(self, features: torch.Tensor, coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = (self.score(features) + self.place(coords.to(features.dtype) / 100)).softmax(0)
        return self.classify(self.drop((weights * features).sum(0))), weights.squeeze(1)


class BatchedMean(nn.Module):
    """``(1, N, D)`` to ``(1, K)``, with a batch of tokens in attention."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.mix = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.1, batch_first=True)
        self.classify = nn.Linear(WIDTH, classes)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.classify(self.mix(features).mean(1))


def bags(sizes: Sequence[int], dtype: torch.dtype = torch.float64) -> list[hyfi_core.TensorTiles]:
    """Return slides of so many random tiles."""
    generator = torch.Generator().manual_seed(3)
    return [
        hyfi_core.TensorTiles(
            torch.rand((n, 3, TILE_PX, TILE_PX), dtype=dtype, generator=generator),
            torch.randint(0, 900, (n, 2), generator=generator),
            f"S{number}",
        )
        for number, n in enumerate(sizes)
    ]


@dataclass
class Trained:
    """What some steps left."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    logits: torch.Tensor


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@dataclass
class Case:
    """Encoder, aggregator and a batch of slides."""

    encoder: nn.Module
    aggregator: nn.Module
    slides: list[hyfi_core.TensorTiles]
    labels: torch.Tensor
    output: Callable[[Any], Any] | None = None
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.cross_entropy
    batch_norm: Any = "frozen"
    batched: bool = False
    steps: int = 1

    def one_process(self, seed: int, replicas: int = 1) -> Trained:
        """Train plainly: one graph over all tiles of all slides, the random numbers keyed alike.

        Running statistics are those of the slides that replica 0 would have.
        """
        encoder, aggregator = copy.deepcopy(self.encoder), copy.deepcopy(self.aggregator)
        if self.batch_norm == "frozen":
            for module in encoder.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        optimizer, losses = sgd([*encoder.parameters(), *aggregator.parameters()]), []
        for step in range(self.steps):
            logits = self._all(encoder, aggregator, seed, step, replicas)
            loss = self.loss(logits, self.labels)
            loss.backward()
            losses.append(loss.item())
            found = {
                f"{part}.{name}": p.grad.clone()
                for part, module in (("encoder", encoder), ("aggregator", aggregator))
                for name, p in module.named_parameters()
                if p.grad is not None
            }
            if self.steps > 1:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        state = {f"encoder.{k}": v for k, v in encoder.state_dict().items()}
        state |= {f"aggregator.{k}": v for k, v in aggregator.state_dict().items()}
        with torch.no_grad():
            encoder.eval(), aggregator.eval()
            logits = self._all(encoder, aggregator, seed, 0)
        return Trained(losses, found, state, logits)

    def _all(self, encoder: nn.Module, aggregator: nn.Module, seed: int, step: int, replicas: int = 1) -> torch.Tensor:
        found, counted = list[torch.Tensor](), _block(len(self.slides), 0, replicas)
        for number in range(len(self.slides)):
            before = [buffer.clone() for buffer in encoder.buffers()]
            found.append(self._forward(encoder, aggregator, number, DrawKey(seed, step, number)))
            if number not in counted:
                for buffer, value in zip(encoder.buffers(), before, strict=True):
                    if not torch.equal(buffer, value):
                        buffer.data.copy_(value)
        return torch.stack(found)

    def _forward(self, encoder: nn.Module, aggregator: nn.Module, n: int, key: DrawKey) -> torch.Tensor:
        tiles = self.slides[n].read(range(len(self.slides[n])))
        with KeyedDraws(key, "encoder", [0]) as one, torch.no_grad():
            training = [(m, m.training) for m in encoder.modules()]
            for module in encoder.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
            encoder(tiles[:1])
            for module, flag in training:
                module.training = flag
        with KeyedDraws(key, "encoder", range(len(tiles)), one.shapes if len(tiles) > 1 else None):
            features = encoder(tiles)
        features = features if self.output is None else self.output(features)
        more = {"coords": self.slides[n].coords} if isinstance(self.aggregator, Attention) else {}
        with KeyedDraws(key, "aggregator"):
            out = aggregator(features.unsqueeze(0) if self.batched else features, **more)
        return (out[0] if isinstance(out, tuple) else out).reshape(-1)

    def by_ranks(self, plan: hyfi_core.ParallelPlan, chunk: int = 4, keep: int | None = None, **more: Any) -> Trained:
        """Train on thread-ranks; the first entry of ``more`` may be ``strict``."""
        copies = [(copy.deepcopy(self.encoder), copy.deepcopy(self.aggregator)) for _ in range(plan.ranks)]

        def body(comm: Any) -> Any:
            engine = hyfi_core.parallelize_tiles(
                *copies[comm.rank], plan, comm, loss=self.loss, optimizer=sgd, output=self.output,
                batch_norm=self.batch_norm, chunk=chunk,
            )  # fmt: skip
            if keep is not None:
                decide = engine._chunks_kept
                engine._chunks_kept = lambda *given: min(keep, decide(*given))  # type: ignore[method-assign]
            replica = comm.rank // plan.ranks_per_replica
            share = _block(len(self.slides), replica, plan.replicas)
            slides, labels = [self.slides[n] for n in share], self.labels[list(share)]
            losses = []
            for _ in range(self.steps):
                losses.append(engine.accumulate(slides, labels))
                gradients = engine.gather_gradients()
                if self.steps > 1:
                    engine.update()
            logits, _ = engine.predict(slides)
            return losses, gradients, engine.gather_state_dict(), logits, replica, engine.random.seed

        results = run_ranks(plan.ranks, body, **more)
        assert all(result[0] == results[0][0] for result in results), "ranks disagree on the loss"
        logits = torch.cat([results[r * plan.ranks_per_replica][3] for r in range(plan.replicas)])
        self.seed = results[0][5]
        return Trained(results[0][0], results[0][1], results[0][2], logits)

    def assert_exact(self, plan: hyfi_core.ParallelPlan, tolerance: float = 1e-10, **how: Any) -> Trained:
        """Compare loss, every gradient, every weight and buffer, and logits with one process."""
        found = self.by_ranks(plan, **how)
        assert_same(found, self.one_process(self.seed, plan.replicas), tolerance)
        return found


def assert_same(found: Trained, wanted: Trained, tolerance: float) -> None:
    """Compare losses, every gradient, every weight and buffer, and logits."""
    for a, b in zip(found.losses, wanted.losses, strict=True):
        assert abs(a - b) <= tolerance * max(1.0, abs(b))
    assert set(found.gradients) == set(wanted.gradients)
    everything = torch.cat([g.flatten() for g in wanted.gradients.values()]).norm()
    for name, gradient in wanted.gradients.items():
        error = (found.gradients[name] - gradient).norm()
        assert error <= tolerance * max(gradient.norm(), 1e-3 * everything), (name, float(error))
    for name, value in wanted.state.items():
        assert torch.allclose(found.state[name].double(), value.double(), tolerance, tolerance), name
    assert torch.allclose(found.logits, wanted.logits, tolerance, tolerance)


def _block(count: int, replica: int, replicas: int) -> range:
    return range(count * replica // replicas, count * (replica + 1) // replicas)
