"""Slides whose class is in one tile of about 300: which aggregators find it, with the encoder frozen and trained?

Draws slides as ``hyfi synth`` does, at 1 µm, in tiles of 32 px. A positive slide has coarse nuclei in one tile only; a
negative one has none. An aggregator is trained on the vectors of a random small CNN that stays as it is, then, with
``--steps``, both together, through ``hyfi_core.parallelize_tiles``.

    python -m workflows.benchmarks.tiles.one_tile [--train 300] [--test 100] [--nuclei 7] [--width 16]
        [--head-steps 250] [--steps 0] [--sampled 0] [--batch 16] [--seed 0] [--ways 1:1,8:8]

With ``--sampled N``, both are trained on at most N tiles of each slide, drawn anew at each step; 0: all.

A way is the number of heads of ``gated_attention`` and their ``spread``, a factor of their initial weights. Printed
for each: the loss of the last 50 steps, the AUROC of test slides, how many of the positive ones have their highest
attention on the tile with the class, and the mean AUROC of attention over their tiles.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import hyfi_core
from hyfi_core.models.aggregators.gated_attention import GatedAttention
from hyfi_core.plan.box import Box
from hyfi_core.runtime.settings import OptimizerFactory
from pathology.synthetic.anatomy import Anatomy, SlideSpec
from pathology.synthetic.placing import make_anatomy
from pathology.synthetic.render import Renderer
from pathology.synthetic.sprites import COARSE, DUSTY
from workflows.benchmarks.demo_task import auroc

SIDE_PX, TILE_PX = 768, 32
_SEED = 5
_RATES = {False: 3e-3, True: 1e-3}
"""Whether the encoder is trained, too -> learning rate."""


class OneTileSlide(hyfi_core.TensorTiles):
    """The tissue tiles of one drawn slide.

    Attributes:
        identity: Name under which the vectors of a frozen encoder are kept.
        with_class: ``(N,)``, whether each tile has the class; False for all tiles of a negative slide.
    """

    def __init__(self, tiles: torch.Tensor, with_class: NDArray[np.bool_], name: str) -> None:
        super().__init__(tiles, name=name)
        self.identity, self.with_class = name, with_class

    @property
    def label(self) -> int:
        """1 if the slide has the class."""
        return int(self.with_class.any())


class Standardised(nn.Module):
    """A random CNN of three convolutions that returns the mean of each map, standardised over some tiles.

    Args:
        width: Channels of the first convolution; vectors are twice as long.
        tiles: Tiles ``(n, 3, T, T)`` uint8 whose vectors get mean 0 and deviation 1.
    """

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, width: int, tiles: torch.Tensor) -> None:
        super().__init__()
        shapes = [(3, width, 2), (width, 2 * width, 2), (2 * width, 2 * width, 1)]
        layers: list[nn.Module] = []
        for inside, outside, stride in shapes:
            conv = nn.Conv2d(inside, outside, 3, stride, 1)
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
            layers += [conv, nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        # `forward` subtracts this mean and divides by this deviation: some channels of a random CNN hardly vary.
        with torch.no_grad():
            vectors = self._vectors(tiles.float() / 255)
        self.register_buffer("mean", vectors.mean(0))
        self.register_buffer("deviation", vectors.std(0) + 1e-6)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        """Return ``(n, 2 * width)``."""
        return (self._vectors(tiles) - self.mean) / self.deviation

    def _vectors(self, tiles: torch.Tensor) -> torch.Tensor:
        # Pixels of tissue have a mean of about 0.7 and a deviation of about 1/5.
        maps: torch.Tensor = self.layers((tiles - 0.7) * 5)
        return maps.mean((2, 3))


def draw_slide(index: int, nuclei: int) -> OneTileSlide:
    """Draw a slide: if ``index`` is odd, it has the class: one tile with ``nuclei`` coarse nuclei or fewer."""
    has_class = index % 2 == 1
    # Each slide is a case of its own. Every slide has coarse nuclei at first; `_with_one_tile` keeps those of one tile.
    anatomy = make_anatomy(SlideSpec(_SEED, index, case=index, size_px=SIDE_PX, positive=True, mpp_um=1.0))
    anatomy, class_tile = _with_one_tile(anatomy, nuclei if has_class else 0)
    side = SIDE_PX // TILE_PX
    centres = np.arange(SIDE_PX) + 0.5
    is_tissue = (anatomy.tissue.grid(centres, centres) > 0).reshape(side, TILE_PX, side, TILE_PX)
    # By tile, (side, side): at least half of it is tissue; it has the class.
    tissue, with_class = is_tissue.mean((1, 3)) >= 0.5, np.zeros((side, side), np.bool_)
    with_class.flat[class_tile] = has_class
    # The tile with the class counts even if little of it is tissue.
    tissue |= with_class
    pixels = Renderer(anatomy).read(Box(0, SIDE_PX, 0, SIDE_PX))
    # (row, column, channel, y, x) of each tile.
    tiles = pixels.reshape(side, TILE_PX, side, TILE_PX, 3).transpose(0, 2, 4, 1, 3)[tissue]
    return OneTileSlide(torch.from_numpy(tiles.copy()), with_class[tissue], f"drawn-{index}-{nuclei}")


def _with_one_tile(anatomy: Anatomy, most: int) -> tuple[Anatomy, int]:
    """Return the slide with coarse nuclei in one tile only, ``most`` of them at most, and that tile's number."""
    nuclei, side = anatomy.nuclei.copy(), SIDE_PX // TILE_PX
    coarse = np.flatnonzero(nuclei[:, 2] == COARSE)
    numbers = np.ravel_multi_index(tuple((nuclei[coarse, :2] // TILE_PX).T), (side, side))
    best = int(np.argmax(np.bincount(numbers, minlength=side * side)))
    centre = (np.array(divmod(best, side)) + 0.5) * TILE_PX
    inside = coarse[numbers == best]
    # Nearest to the centre, so that nuclei hardly reach into other tiles.
    nearest = inside[np.argsort(np.abs(nuclei[inside, :2] - centre).max(1))[:most]]
    # Other nuclei become dusty rather than removed: their number must not tell the class.
    nuclei[np.setdiff1d(coarse, nearest), 2] = DUSTY
    return replace(anatomy, nuclei=nuclei), best


def batches(slides: list[OneTileSlide], size: int, seed: int) -> Iterator[list[OneTileSlide]]:
    """Yield batches, in a new order in each epoch."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(slides))
        for first in range(0, len(slides) - size + 1, size):
            yield [slides[number] for number in order[first : first + size]]


def sampled(slide: OneTileSlide, most: int, rng: np.random.Generator) -> OneTileSlide:
    """Return a slide with at most ``most`` of its tiles, drawn at random; all of them if ``most`` is 0."""
    if not 0 < most < len(slide):
        return slide
    chosen = np.sort(rng.choice(len(slide), most, replace=False))
    return OneTileSlide(slide.read(chosen.tolist()), slide.with_class[chosen], "")


def fit(
    encoder: nn.Module,
    aggregator: nn.Module,
    slides: Iterator[list[OneTileSlide]],
    steps: int,
    *,
    whole: bool,
    most: int = 0,
) -> float:
    """Train the aggregator, or with ``whole`` both; return the mean loss of the last 50 steps.

    Labels are those of whole slides, also where only ``most`` tiles of a slide are read.
    """
    encoder.requires_grad_(whole)
    adamw: OptimizerFactory = partial(torch.optim.AdamW, lr=_RATES[whole])
    engine = hyfi_core.parallelize_tiles(
        encoder, aggregator, hyfi_core.ParallelPlan(tiles=1), hyfi_core.init(), optimizer=adamw
    )
    rng, losses = np.random.default_rng(0), []
    for _ in range(steps):
        batch = next(slides)
        losses.append(engine.train_step([sampled(s, most, rng) for s in batch], torch.tensor([s.label for s in batch])))
    return float(np.mean(losses[-50:]))


def judge(encoder: nn.Module, aggregator: nn.Module, slides: list[OneTileSlide]) -> dict[str, float]:
    """Return how well a model tells slides apart, and its attention the tiles of positive slides.

    ``auroc``: of slides; ``hits``: share of positive slides whose tile of highest attention has the class;
    ``auroc_of_tiles``: mean over positive slides of the AUROC of attention.
    """
    engine = hyfi_core.parallelize_tiles(encoder, aggregator, hyfi_core.ParallelPlan(tiles=1), hyfi_core.init())
    logits, attention = engine.predict(slides)
    scores = (logits[:, 1] - logits[:, 0]).double().numpy()
    pairs = [(a.numpy(), s.with_class) for a, s in zip(attention or [], slides, strict=True) if s.label]
    return {
        "auroc": round(auroc(scores, np.array([slide.label for slide in slides])), 3),
        "hits": round(float(np.mean([truth[values.argmax()] for values, truth in pairs])), 3),
        "auroc_of_tiles": round(float(np.mean([auroc(values, truth.astype(int)) for values, truth in pairs])), 3),
    }


def main() -> None:
    """Print a line of JSON for each way and stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"train": 300, "test": 100, "nuclei": 7, "width": 16, "head-steps": 250, "steps": 0, "sampled": 0}
    for name, default in (numbers | {"batch": 16, "seed": 0}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ways", default="1:1,8:8")
    args = parser.parse_args()
    drawn = [draw_slide(index, args.nuclei) for index in range(args.train + args.test)]
    train, test = drawn[: args.train], drawn[args.train :]
    print(json.dumps({"tiles_of_a_slide": round(float(np.mean([len(slide) for slide in drawn])))}), flush=True)
    some = torch.cat([slide.read(range(len(slide))) for slide in train[:20]])
    for way in args.ways.split(","):
        heads, spread = way.split(":")  # of gated attention
        torch.manual_seed(args.seed)
        encoder = Standardised(args.width, some)
        aggregator = GatedAttention(2 * args.width, 2, heads=int(heads), spread=float(spread))
        # First the aggregator alone, then the whole model.
        for whole, steps in ((False, args.head_steps), (True, args.steps)):
            if steps:
                start_s, order = time.process_time(), batches(train, args.batch, args.seed)
                loss = fit(encoder, aggregator, order, steps, whole=whole, most=args.sampled if whole else 0)
                row: dict[str, Any] = {"heads": int(heads), "spread": float(spread)}
                row |= {"encoder": "trained" if whole else "frozen"}
                row |= {"steps": steps, "loss": round(loss, 3), **judge(encoder, aggregator, test)}
                print(json.dumps(row | {"processor_s": round(time.process_time() - start_s)}), flush=True)


if __name__ == "__main__":
    main()
