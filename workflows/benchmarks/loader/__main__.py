"""Benchmark of a loader's decoding worker: bytes of pixels that one core prepares in a second, from a local store.

    python -m workflows.benchmarks.loader SLIDE.svs [--px 4096] [--images 4] [--rounds 3]

The slide is ingested. A worker on one core then prepares squares of it ahead of time, as it does for trainers: as they
are, only turned, and with the default augmentation. zarr-python reads the same squares with one thread, and tensorstore
does if it is installed (``pip install -e .[test,rivals]``). All take turns in each round. The last lines are medians,
MB of pixels for a second of processor time, and ratios to zarr-python within each round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data.samples.augment import Augment
from data.store.slide_store import SlideStore, slide_path
from hyfi_core.plan.box import Box
from pathology.ingest.archive import Request, ingest
from pathology.ingest.options import IngestOptions
from workflows.benchmarks.loader.squares import Squares
from workflows.benchmarks.one_core import preparing

MB = 1e6


def main() -> None:
    """Ingest the slide, let a worker on one core prepare images of it, and print the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slide", type=Path)
    parser.add_argument("--px", type=int, default=4096, help="side of a square")
    parser.add_argument("--images", type=int, default=4, help="squares, at least 2; the first one is not timed")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        store = Path(name) / "store"
        (record,) = ingest(Request([args.slide], store, IngestOptions(native=True))).done
        rates = measure(slide_path(store, record.slide_id), args.px, args.images, args.rounds)
    report(rates)


def measure(path: Path, side_px: int, images: int, rounds: int) -> dict[str, list[float]]:
    """Return way to read -> bytes of pixels per second of processor, in each round."""
    boxes = squares(path, side_px, images)
    samples = {
        "worker": Squares(path, boxes, None),
        "worker, turned": Squares(path, boxes, Augment(stain=0.0, colour=0.0)),
        "worker, augmented": Squares(path, boxes, Augment()),
    }
    ways: dict[str, Callable[[], float]] = {name: _preparing(sample) for name, sample in samples.items()}
    ways |= {name: _reading(read, boxes) for name, read in _other_libraries(path).items()}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        # Ways alternate, so that a slow phase of the machine affects all of them.
        for name, seconds in ways.items():
            # The first box opens files, and is read before the clock starts.
            rates[name].append(3 * sum(box.area for box in boxes[1:]) / seconds())
    return rates


def squares(path: Path, side_px: int, images: int) -> tuple[Box, ...]:
    """Return ``images`` squares in a row in the middle of the slide, smaller ones if it is too small."""
    level = SlideStore.open(path).levels[0]
    side = min(side_px, level.height_px, level.width_px // images)
    y0, x0 = (level.height_px - side) // 2, (level.width_px - images * side) // 2
    return tuple(Box(y0, y0 + side, x0 + n * side, x0 + (n + 1) * side) for n in range(images))


def report(rates: dict[str, list[float]]) -> None:
    """Print the median rates, and the median of the ratios to zarr-python within each round."""
    for name, own_rates in rates.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(own_rates, rates["zarr-python"], strict=True))
        print(f"{name}: {statistics.median(own_rates) / MB:.0f} MB/s a core, {ratio:.2f} of zarr-python")


def _preparing(samples: Squares) -> Callable[[], float]:
    """Return a function that returns the processor seconds in which a worker prepares all squares but the first."""
    return lambda: preparing(samples, len(samples.boxes), samples.boxes[0].shape, 1)[0].cpu_s


def _other_libraries(path: Path) -> dict[str, Callable[[Box], Any]]:
    """Return library -> function that reads a box of the slide with it, with one thread."""
    import zarr

    # One thread each, like the worker on its one core.
    zarr.config.set({"threading.max_workers": 1, "async.concurrency": 1})
    array: Any = zarr.open_group(path, mode="r")["0"]
    readers: dict[str, Callable[[Box], Any]] = {"zarr-python": lambda box: array[(slice(None), *box.slices())]}
    try:
        import tensorstore
    except ImportError:
        print("tensorstore: not installed")
        return readers
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path / "0")}}
    context = {"data_copy_concurrency": {"limit": 1}, "file_io_concurrency": {"limit": 1}}
    array_of_tensorstore = tensorstore.open(spec, open=True, context=tensorstore.Context(context)).result()
    return readers | {"tensorstore": lambda box: array_of_tensorstore[(slice(None), *box.slices())].read().result()}


def _reading(read: Callable[[Box], Any], boxes: Sequence[Box]) -> Callable[[], float]:
    """Return a function that returns the processor seconds in which ``read`` reads all boxes but the first.

    The first box, with which files are opened, is read before the clock starts, as it is for a worker.
    """

    def seconds() -> float:
        read(boxes[0])
        begin = time.process_time()
        for box in boxes[1:]:
            read(box)
        return time.process_time() - begin

    return seconds


if __name__ == "__main__":
    main()
