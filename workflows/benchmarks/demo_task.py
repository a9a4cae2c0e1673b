"""Benchmark of the demo's task: the same network trained on slides and on thumbnails, to see if it needs resolution.

Plain PyTorch in one process: the result depends on the synthetic slides, not on parallel training.

    python -m workflows.benchmarks.demo_task [--slides N] [--size PX] [--archive-seed S] [--seed 0 1 2]
    python -m workflows.benchmarks.demo_task --maps demo/predictions
    python -m workflows.benchmarks.demo_task --mean-head demo/run/checkpoints/best --drawn demo/slides

With ``--maps``, nothing is trained: the scores in the heatmaps of a folder of predictions are compared, square by
square, with the foci that were drawn. With ``--mean-head``, the pooling of a trained network is replaced by the mean,
its head alone is fitted to the training slides, and its scores are compared likewise. All other options are those of
the archive.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from numpy.typing import NDArray

from hyfi_core.models import resnet
from hyfi_core.plan.box import Box
from pathology.readers.sources import open_source
from pathology.synthetic.anatomy import tissue_truth
from pathology.synthetic.archive import ArchiveSlide, lay_out_archive, make_archive
from pathology.synthetic.placing import make_anatomy
from workflows.commands.demo import RECIPE, Archive

THUMBNAIL_PX = 256


@dataclass(frozen=True)
class TaskRecipe:
    """Model and training parameters of the demo's YAML."""

    name: str
    width: int
    pool: str
    batch_size: int
    epochs: int
    lr: float
    weight_decay: float
    warmup_steps: int
    max_norm: float

    @classmethod
    def of_demo(cls) -> TaskRecipe:
        """Return the recipe that ``hyfi demo`` trains."""
        config = yaml.safe_load(RECIPE.read_text())
        model, optimizer = config["model"], config["optimizer"]
        return cls(
            name=model["name"],
            width=model["options"]["width"],
            pool=model["pool"],
            batch_size=config["data"]["batch_size"],
            epochs=config["run"]["epochs"],
            lr=optimizer["lr"],
            weight_decay=optimizer["weight_decay"],
            warmup_steps=config["lr_schedule"]["warmup_steps"],
            max_norm=optimizer["max_norm"],
        )


@dataclass(frozen=True)
class Slides:
    """Images (n, h, w, 3) uint8 and labels (n,) of one split."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


def read_archive(planned: list[ArchiveSlide], folder: Path, mpp_um: float = 1.0) -> dict[str, Slides]:
    """Write the archive into ``folder``, read each whole slide at ``mpp_um``, and return the slides of each split."""
    make_archive(planned, folder, workers=2)
    images: dict[str, list[tuple[NDArray[np.uint8], int]]] = {"train": [], "val": [], "test": []}
    for slide in planned:
        images[slide.split].append((read_slide(slide, folder, mpp_um), int(slide.spec.positive)))
    return {name: Slides(np.stack([i for i, _ in s]), np.array([y for _, y in s])) for name, s in images.items() if s}


def shrink(slides: Slides, size_px: int) -> Slides:
    """Return the slides as thumbnails of ``size_px``, by averaging squares of pixels."""
    n, height = slides.images.shape[:2]
    factor = height // size_px
    # Squares of factor x factor pixels; the pixels that fill no square, at the lower and right edge, are left out.
    cut = slides.images[:, : size_px * factor, : size_px * factor].reshape(n, size_px, factor, size_px, factor, 3)
    return Slides(np.round(cut.mean((2, 4), dtype=np.float32)).astype(np.uint8), slides.labels)


def augmented(image: NDArray[np.uint8], rng: np.random.Generator) -> torch.Tensor:
    """Return one augmented image (3, h, w) float32 in 0…255: rotated, mirrored, with slightly changed colours."""
    image = np.rot90(image, int(rng.integers(4)))
    image = image[:, ::-1] if rng.random() < 0.5 else image
    gain, shift = rng.uniform(0.95, 1.05, 3).astype(np.float32), rng.uniform(-0.01, 0.01, 3).astype(np.float32)
    levels = np.arange(256, dtype=np.float32)[:, None]
    # Gain acts on optical density: I = 245 · 10^(−d), and (I / 245)^gain is d · gain.
    table = np.clip(245 * (np.maximum(levels, 1) / 245) ** gain + 255 * shift, 0, 255)
    return torch.from_numpy(np.stack([table[:, c][image[..., c]] for c in range(3)]))


def normalised(batch: torch.Tensor) -> torch.Tensor:
    """Return images of 0…255 shifted and scaled to about mean 0 and variance 1."""
    return (batch - 178.5) / 51.0


def train(slides: Slides, recipe: TaskRecipe, seed: int, log: bool = False) -> torch.nn.Module:
    """Train the demo's network from scratch on one split."""
    torch.manual_seed(seed)
    model: torch.nn.Module = getattr(resnet, recipe.name)(classes=2, pool=recipe.pool, norm="train", width=recipe.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    n = len(slides.labels)
    per_epoch = n // recipe.batch_size
    total = recipe.epochs * per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        # Warm-up, then a cosine that ends near 0.
        lambda step: min((step + 1) / recipe.warmup_steps, 0.5 * (1 + np.cos(np.pi * step / total)) + 1e-3),
    )
    labels = torch.from_numpy(slides.labels)
    for epoch in range(recipe.epochs):
        rng = np.random.default_rng([seed, epoch])
        order, losses, start = rng.permutation(n), [], time.perf_counter()
        for step in range(per_epoch):
            chosen = order[step * recipe.batch_size : (step + 1) * recipe.batch_size]
            batch = normalised(torch.stack([augmented(slides.images[i], rng) for i in chosen]))
            loss = F.cross_entropy(model(batch), labels[chosen])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
        if log:
            seconds = (time.perf_counter() - start) / per_epoch
            print(f"epoch {epoch}: loss {np.mean(losses):.4f}, {seconds:.2f} s a step", flush=True)
    return model


def scores(model: torch.nn.Module, slides: Slides) -> NDArray[np.float64]:
    """Return the log-odds of the positive class for each slide."""
    model.eval()
    with torch.no_grad():
        images = (torch.from_numpy(image).permute(2, 0, 1).float()[None] for image in slides.images)
        logits = torch.cat([model(normalised(image)) for image in images])
    return (logits[:, 1] - logits[:, 0]).double().numpy()


def auroc(score: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """Return the area under the ROC curve: the fraction of pairs (positive, negative) in right order, ties half."""
    gaps = score[labels == 1][:, None] - score[labels == 0][None, :]
    return float(((gaps > 0) + 0.5 * (gaps == 0)).mean())


def compare(splits: dict[str, Slides], recipe: TaskRecipe, seed: int, log: bool = False) -> dict[str, float]:
    """Train on whole slides, then on thumbnails; return both AUROCs of the test split.

    ``seconds_whole`` are those of training and testing on whole slides.
    """
    start = time.perf_counter()
    test = splits["test"]
    whole_auroc = auroc(scores(train(splits["train"], recipe, seed, log), test), test.labels)
    seconds = time.perf_counter() - start
    small = shrink(test, THUMBNAIL_PX)
    thumbnail_auroc = auroc(scores(train(shrink(splits["train"], THUMBNAIL_PX), recipe, seed), small), small.labels)
    return {
        "seed": seed,
        "auroc_whole": whole_auroc,
        "auroc_thumbnail": thumbnail_auroc,
        "seconds_whole": round(seconds, 1),
    }


def auroc_by_position(planned: list[ArchiveSlide], predictions: Path) -> dict[str, float]:
    """Return how well heatmaps find the drawn foci: the AUROC of the positive class's scores in squares with tissue.

    The squares of all slides are pooled. A square is positive if its centre lies in a focus of a positive slide.
    """
    import tifffile

    scored: list[NDArray[np.float32]] = []
    truth: list[NDArray[np.bool_]] = []
    slides = [slide for slide in planned if (predictions / slide.slide_id / "heatmap.tiff").exists()]
    for slide in slides:
        score = tifffile.imread(predictions / slide.slide_id / "heatmap.tiff")[1]
        focus, tissue = drawn_truth(slide, score.shape)
        counted = np.isfinite(score) & tissue
        scored.append(score[counted])
        truth.append(focus[counted])
    return {"slides": len(slides), **_auroc_of_squares(np.concatenate(scored), np.concatenate(truth))}


def drawn_truth(slide: ArchiveSlide, shape: tuple[int, ...]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return (mask of the foci, mask of the tissue) of a drawn slide, for a heatmap of this shape."""
    anatomy, square_um = make_anatomy(slide.spec), slide.spec.size_um / shape[0]
    # Centres of the squares.
    y, x = (np.arange(shape[0]) + 0.5)[:, None] * square_um, (np.arange(shape[1]) + 0.5) * square_um
    focus = np.zeros(shape, bool)
    for centre_y, centre_x, radius in anatomy.nests[anatomy.foci] if slide.spec.positive else ():
        focus |= np.hypot(y - centre_y, x - centre_x) < radius
    return focus, tissue_truth(anatomy, square_um)


def _auroc_of_squares(scores: NDArray[np.floating], positive: NDArray[np.bool_]) -> dict[str, float]:
    """Return the area under the ROC curve of squares, their number (``cells``), and how many of them are positive."""
    from scipy.stats import rankdata

    ranks, n = rankdata(scores), int(positive.sum())
    # Mann–Whitney's U by ranks, as `auroc` holds all pairs in memory: of thousands of squares, these would not fit.
    area = (ranks[positive].sum() - n * (n + 1) / 2) / (n * (len(positive) - n))
    return {"cells": len(positive), "positive": n, "auroc": round(float(area), 4)}


def fit_mean_head(planned: list[ArchiveSlide], drawn: Path, checkpoint: Path, steps: int = 300) -> dict[str, object]:
    """Fit the head of a trained network to means over whole training slides; all other weights stay.

    Args:
        planned: The archive.
        drawn: Folder with its slides.
        checkpoint: Checkpoint of a network with a linear head, trained on the archive with any pooling.
        steps: Number of steps of AdamW at a learning rate of 1e-2, each over all training slides, without augmentation.

    Returns:
        AUROC of the test slides, and of the smoothed scores of all their squares with tissue.
    """
    from data.loading.normalise import Normalisation
    from hyfi_core.models.by_name import build_model
    from hyfi_core.runtime.checkpoint import load_checkpoint
    from pathology.predict.heatmap import smoothed

    loaded = load_checkpoint(checkpoint)
    model = build_model({**loaded.model["model"], "pool": "avg"}).eval()
    model.load_state_dict(loaded.inference_weights)
    head, normalise = model.get_submodule("fc"), Normalisation.from_json(loaded.model["normalisation"])
    last: list[torch.Tensor] = []
    # The last map is the output of the module before the head: pooling is a function, not a module.
    list(model.children())[-2].register_forward_hook(lambda module, args, output: last.append(output))
    maps: dict[str, torch.Tensor] = {}
    for slide in planned:
        image = read_slide(slide, drawn)
        with torch.no_grad():
            model(normalise(torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None]))
        maps[slide.slide_id] = last.pop()[0]
    training = [slide for slide in planned if slide.split == "train"]
    features = torch.stack([maps[slide.slide_id].mean((1, 2)) for slide in training])
    labels = torch.tensor([int(slide.spec.positive) for slide in training])
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(head(features), labels).backward()
        optimizer.step()
    tested = [slide for slide in planned if slide.split == "test"]
    mean_scores, scored, truth = [], [], []
    for slide in tested:
        with torch.no_grad():
            logits = head(maps[slide.slide_id].permute(1, 2, 0))
        # The difference of the two classes' logits: the log-odds of the positive one.
        mean_scores.append(float(logits.mean((0, 1)) @ torch.tensor([-1.0, 1.0])))
        # Smoothed, as in a heatmap of `hyfi predict`.
        score = smoothed(logits.softmax(-1).permute(2, 0, 1).numpy())[1]
        focus, tissue = drawn_truth(slide, score.shape)
        scored.append(score[tissue])
        truth.append(focus[tissue])
    slides = auroc(np.array(mean_scores), np.array([int(slide.spec.positive) for slide in tested]))
    return {"slides": slides, "positions": _auroc_of_squares(np.concatenate(scored), np.concatenate(truth))}


def read_slide(slide: ArchiveSlide, folder: Path, mpp_um: float = 1.0) -> NDArray[np.uint8]:
    """Return the pixels of a whole drawn slide, (h, w, 3)."""
    source = open_source(folder / slide.row["path"])
    # Levels are halved: level k has 2^k times the microns per pixel.
    number = round(np.log2(mpp_um / slide.spec.mpp_um))
    level = source.levels[number]
    image = source.read(Box.of_size(level.height_px, level.width_px), number)
    source.close()
    return np.ascontiguousarray(image)


def main() -> None:
    """Print one JSON line for each training seed, or for the maps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    archive = Archive()
    parser.add_argument("--slides", type=int, default=archive.slides)
    parser.add_argument("--size", type=int, default=archive.size_px)
    parser.add_argument("--archive-seed", type=int, default=archive.seed)
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--maps", type=Path, metavar="PREDICTIONS")
    parser.add_argument("--mean-head", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--drawn", type=Path, metavar="SLIDES", help="the archive's slides, for --mean-head")
    args = parser.parse_args()
    planned = lay_out_archive(args.slides, args.size, args.archive_seed)
    if args.maps is not None:
        print(json.dumps(auroc_by_position(planned, args.maps)))
        return
    if args.mean_head is not None:
        print(json.dumps(fit_mean_head(planned, args.drawn, args.mean_head)))
        return
    with tempfile.TemporaryDirectory() as folder:
        splits = read_archive(planned, Path(folder))
    print({name: len(part.labels) for name, part in splits.items()}, flush=True)
    recipe = TaskRecipe.of_demo()
    for seed in args.seed:
        print(json.dumps(compare(splits, recipe, seed, log=True)), flush=True)


if __name__ == "__main__":
    main()
