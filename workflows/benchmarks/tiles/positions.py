"""Do encoders that were trained with labels of whole slides only attend to the tiles that have the class?

Draws an archive as ``hyfi synth`` does, in which the class of a positive slide is in its five to seven foci, and trains
a random small ResNet with gated attention and with max pooling by ``hyfi train``, and an aggregator of the frozen one.
The test slides are drawn once more, larger, with the class in a single tile.

    python -m workflows.benchmarks.tiles.positions [--slides 80] [--size 1632] [--one-size 2208] [--tile 96] [--mpp 1.0]
        [--rate 0.002] [--steps 200] [--norm frozen|exact|group] [--ways gated_attention,max,frozen]
        [--train-on foci|one] [--folder DIR]

A tile has the class if the centre of a coarse nucleus lies in it. Of the test slides that have the class, the
benchmark prints how many have their highest attention, contribution to the class's logit and score on such a tile, and
the mean AUROC of each over their tiles; beside them the AUROC of the slides, and how many tiles they have.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import yaml
from numpy.typing import NDArray
from torch import nn

from hyfi_core.models.resnet import resnet6
from pathology.synthetic.anatomy import Anatomy
from pathology.synthetic.archive import POSITIVE, ArchiveSlide, lay_out_archive, write_manifest
from pathology.synthetic.placing import make_anatomy
from pathology.synthetic.sprites import COARSE, DUSTY
from pathology.synthetic.tiff import write_slide
from workflows.benchmarks.demo_task import auroc

_HYFI = [sys.executable, "-m", "workflows"]
_MEASURES = ("attention", f"contribution {POSITIVE}", f"score {POSITIVE}")
_DRAWN_MPP = 0.5


@dataclass(frozen=True)
class PositionsTask:
    """What is drawn.

    Attributes:
        count: Number of slides.
        size_px: Height and width of a slide, at 0.5 µm a pixel.
        tile_px: Height and width of a tile in pixels of the slide.
        mpp: Microns per pixel of the tiles that the encoder sees.
        one_tile: Whether the class of a slide is in one tile only, the one with most coarse nuclei; otherwise it is in
            all foci.
    """

    count: int
    size_px: int
    tile_px: int
    mpp: float
    one_tile: bool

    @property
    def name(self) -> str:
        """Name of the folder of the drawn slides, different for other settings."""
        where = "one" if self.one_tile else "foci"
        return f"{self.count}-slides-{self.size_px}-px-tiles-{self.tile_px}-px-{where}"

    @cached_property
    def slides(self) -> list[ArchiveSlide]:
        """The slides of all splits."""
        return lay_out_archive(self.count, self.size_px)

    def anatomy(self, slide: ArchiveSlide) -> Anatomy:
        """Return the tissue and nuclei of a slide; with ``one_tile``, with coarse nuclei in one tile only."""
        anatomy = make_anatomy(slide.spec)
        if not self.one_tile:
            return anatomy
        nuclei, with_class = anatomy.nuclei.copy(), self.tiles_with_class(anatomy)
        best = np.array(np.unravel_index(np.argmax(with_class), with_class.shape))
        outside = (nuclei[:, :2] // self.tile_px != best).any(1)
        # Coarse nuclei outside of the best tile become dusty, not removed: their number must not tell the class.
        nuclei[outside & (nuclei[:, 2] == COARSE), 2] = DUSTY
        return replace(anatomy, nuclei=nuclei)

    def tiles_with_class(self, anatomy: Anatomy) -> NDArray[np.int64]:
        """Return the number of coarse nuclei of each tile, (rows, columns)."""
        side = -(-self.size_px // self.tile_px)
        counts = np.zeros((side, side), np.int64)
        coarse = anatomy.nuclei[anatomy.nuclei[:, 2] == COARSE]
        np.add.at(counts, tuple((coarse[:, :2] // self.tile_px).T), 1)
        return counts


def small_resnet(norm: str, width: int = 16) -> nn.Module:
    """Return five convolutions with batch or group norm and max pooling: (n, 3, T, T) to (n, 2 × width)."""
    network = resnet6(classes=1, pool="max", norm="group" if norm == "group" else "train", width=width)
    # No classifier: the network returns the pooled vectors.
    network.fc = nn.Identity()  # type: ignore[assignment]
    return network


def draw(task: PositionsTask, folder: Path, splits: tuple[str, ...] = ("train", "val", "test")) -> None:
    """Write the slides of some splits, and their manifest, into ``folder`` if they are not there yet."""
    if (folder / "manifest.csv").exists():
        return
    slides = [slide for slide in task.slides if slide.split in splits]
    folder.mkdir(parents=True, exist_ok=True)  # it may exist, if an earlier drawing was interrupted
    with get_context("spawn").Pool(2) as pool:
        pool.map(partial(_draw_slide, task, folder), slides)
    write_manifest(slides, folder)


def _draw_slide(task: PositionsTask, folder: Path, slide: ArchiveSlide) -> None:
    write_slide(task.anatomy(slide), folder / slide.row["path"])


def train(task: PositionsTask, store: Path, run: Path, way: str, norm: str, steps: int, rate: float) -> Path:
    """Train encoder and aggregator in one way; return the folder of the last checkpoint.

    ``way``: an aggregator, or ``frozen``: gated attention on a frozen encoder. ``norm``: exact, frozen or group.
    """
    frozen = way == "frozen"
    encoder = {
        "name": "workflows.benchmarks.tiles.positions:small_resnet",
        "options": {"norm": norm},
        "train": "none" if frozen else "all",
        "batch_norm": "exact" if norm == "exact" and not frozen else "frozen",
    }
    tree: dict[str, Any] = {
        "data": {
            "store": str(store),
            "batch_size": 2,
            "tiles": {"size_px": round(task.tile_px * _DRAWN_MPP / task.mpp)},
        },
        "model": {
            "encoder": encoder,
            "aggregator": {"name": "gated_attention" if frozen else way},
        },
        "optimizer": {"name": "adamw", "lr": rate, "max_norm": 1.0},
        "lr_schedule": {"name": "cosine", "warmup_steps": 10},
        "validation": {"every_steps": steps},
        "run": {"dir": str(run), "steps": steps, "tensorboard": False},
    }
    config = run.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(tree))
    _hyfi("train", config)
    return run / "checkpoints" / "latest"


def predict(task: PositionsTask, checkpoint: Path, slides: Path, out: Path) -> None:
    """Predict the test slides in the folder ``slides``."""
    paths = sorted(slide.row["path"] for slide in task.slides if slide.split == "test")
    _hyfi("predict", checkpoint, *(slides / path for path in paths), "--out", out)


def judge(task: PositionsTask, out: Path) -> dict[str, Any]:
    """Return the AUROC of slides, and how well the maps of attention, contribution and score find tiles with the class.

    Only maps of slides with the class count. ``…_hits``: slides whose highest tile has the class; ``…_auroc``: mean
    AUROC of the tiles of a slide.
    """
    with (out / "predictions.csv").open() as stream:
        scores = {row["slide_id"]: float(row[f"p_{POSITIVE}"]) for row in csv.DictReader(stream)}
    tested = [slide for slide in task.slides if slide.split == "test"]
    labels = np.array([int(slide.spec.positive) for slide in tested])
    result: dict[str, Any] = {"auroc": round(auroc(np.array([scores[s.slide_id] for s in tested]), labels), 3)}
    positive = [slide for slide in tested if slide.spec.positive]
    maps = {slide.slide_id: _maps(out / slide.slide_id / "heatmap.tiff") for slide in positive}
    truth = {slide.slide_id: task.tiles_with_class(task.anatomy(slide)) > 0 for slide in positive}
    seen = {name: np.isfinite(layers["attention"]) for name, layers in maps.items()}
    result |= {
        "positive_slides": len(positive),
        "tiles": round(float(np.mean([mask.sum() for mask in seen.values()]))),
        "with_class": round(float(np.mean([(truth[name] & seen[name]).sum() for name in truth])), 1),
    }
    for measure in _MEASURES:
        # Tiles that were not shown have no value, and are never the highest.
        values = {name: np.where(seen[name], layers[measure], -np.inf) for name, layers in maps.items()}
        hits = [bool(truth[name].flat[int(np.argmax(value))]) for name, value in values.items()]
        areas = [auroc(value[seen[name]], truth[name][seen[name]].astype(int)) for name, value in values.items()]
        kind = measure.split()[0]  # "score" of "score CLASS", for the keys of the result
        result |= {f"{kind}_hits": sum(hits), f"{kind}_auroc": round(float(np.mean(areas)), 3)}
    return result


def _maps(path: Path) -> dict[str, NDArray[np.float64]]:
    """Return the channels of a heatmap by name, (rows, columns) each."""
    with tifffile.TiffFile(path) as file:
        values, xml = file.asarray(), file.ome_metadata or ""
    channels = xml.split('Channel ID="')[1:]
    names = [channel.split('Name="', 1)[1].split('"', 1)[0] for channel in channels]
    return {name: value.astype(np.float64) for name, value in zip(names, values, strict=True)}


def _hyfi(*words: object) -> None:
    subprocess.run([*_HYFI, *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Print a line of JSON for each way and each kind of test slides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("slides", 80), ("size", 1632), ("one-size", 2208), ("tile", 96), ("steps", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mpp", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=0.002)
    parser.add_argument("--norm", choices=("frozen", "exact", "group"), default="frozen")
    parser.add_argument("--train-on", choices=("foci", "one"), default="foci")
    parser.add_argument("--ways", default="gated_attention,max,frozen")
    parser.add_argument("--folder", type=Path, help="keep slides, store and runs there; default: nothing is kept")
    args = parser.parse_args()
    trained = PositionsTask(args.slides, args.size, args.tile, args.mpp, one_tile=args.train_on == "one")
    # Every model is tested on these slides, too, whose class is in one tile only.
    one = PositionsTask(args.slides, args.one_size, args.tile, args.mpp, one_tile=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = args.folder or Path(temporary)
        tested = {args.train_on: (trained, folder / trained.name), "one tile": (one, folder / f"{one.name}-test")}
        store = folder / f"store-of-{trained.name}-{args.mpp}-um"
        runs = folder / f"runs-of-{trained.name}-{args.mpp}-um-{args.norm}-{args.steps}-steps-rate-{args.rate}"
        runs.mkdir(parents=True, exist_ok=True)
        draw(trained, folder / trained.name)
        draw(one, folder / f"{one.name}-test", ("test",))
        _hyfi("ingest", folder / trained.name / "manifest.csv", "--out", store, "--mpp", args.mpp)
        for way in args.ways.split(","):
            checkpoint = train(trained, store, runs / way, way, args.norm, args.steps, args.rate)
            for kind, (task, slides) in tested.items():
                out = runs / f"{way}-on-{slides.name}"
                predict(task, checkpoint, slides, out)
                print(json.dumps({"way": way, "tested_on": kind, **judge(task, out)}), flush=True)


if __name__ == "__main__":
    main()
