"""Benchmark of loading from a store that is far away, against the same store on this machine's disk, in turns.

    python -m workflows.benchmarks.remote [--latency-ms 5] [--size 4096] [--image 2048] [--rounds 5] [--workers 1]

Decoding workers prepare images ahead of time, as those of a loader do: from a folder; over HTTP from a server on
loopback, which waits ``--latency-ms`` before each answer; and from the folder, where each opening and each reading of a
file waits as long, as on a network disk. Slides are opened, and every index is read, in each round again. Prints the
megapixels per second of each (medians) and, as its last line, the ratios to the folder.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.loading.decode_pool import DecodePool
from data.location import location
from data.samples.dataset import SlideDataset, SlideRef
from hyfi_core.plan.box import Box
from pathology.ingest.archive import Request, ingest
from pathology.ingest.options import IngestOptions
from pathology.synthetic.archive import plan_archive, write_archive_slide
from workflows.benchmarks.remote.slow_disk import SlowOpener

MPP = 0.5
AHEAD = 4
"""Images that each worker has ahead."""
AT_A_TIME = 2
"""Images that each worker prepares at a time, as for a store that is far; here also for the folder."""


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=float, default=5.0)
    parser.add_argument("--size", type=int, default=4096, help="height and width of a slide in pixels")
    parser.add_argument("--image", type=int, default=2048, help="height and width of an image in pixels")
    parser.add_argument("--slides", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=4, help="times that each image is prepared in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        slides = make_store(folder, given.slides, given.size)
        with running_server(folder, given.latency_ms) as address:
            sides: dict[str, SlideDataset] = {
                "folder": dataset(folder / "store", slides, given.image, None),
                "object storage": dataset(location(f"{address}/store"), slides, given.image, None),
                "network disk": dataset(folder / "store", slides, given.image, SlowOpener(given.latency_ms / 1e3)),
            }
            rates: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(given.rounds):
                for side, samples in sides.items():
                    rates[side].append(rate(samples, given.workers, given.epochs))
    report(rates, given.latency_ms)


def report(rates: dict[str, list[float]], latency_ms: float) -> None:
    """Print the medians and the ratios to the folder, those of each round."""
    for side, found in rates.items():
        print(f"{side}: {statistics.median(found):.1f} MP/s")
    ratios = {
        side: statistics.median(far / near for far, near in zip(found, rates["folder"], strict=True))
        for side, found in rates.items()
        if side != "folder"
    }
    shown = ", ".join(f"{side} {ratio:.2f}" for side, ratio in ratios.items())
    print(f"of the folder's rate, at {latency_ms:g} ms: {shown}")


def make_store(folder: Path, slides: int, size_px: int) -> tuple[SlideRef, ...]:
    """Write synthetic slides and ingest them; return those of the store."""
    (folder / "slides").mkdir()
    for slide in plan_archive(slides, size_px):
        write_archive_slide(slide, folder / "slides")
    report = ingest(Request([folder / "slides"], folder / "store", IngestOptions(mpp=MPP)))
    return tuple(SlideRef(record.slide_id) for record in report.done)


def dataset(store: Path, slides: tuple[SlideRef, ...], image_px: int, opener: SlowOpener | None) -> SlideDataset:
    """Return images of ``image_px`` of the slides."""
    return SlideDataset(store, slides, size_px=image_px, mpp=MPP, view="crop", opener=opener)


@contextmanager
def running_server(folder: Path, latency_ms: float) -> Iterator[str]:
    """Context with a server of the folder; yields its address."""
    command = [sys.executable, "-m", "workflows.benchmarks.remote.range_server", str(folder), str(latency_ms)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


def rate(samples: SlideDataset, workers: int, epochs: int) -> float:
    """Return the megapixels per second at which workers prepare each image once an epoch, ahead of time."""
    height, width = samples.size_px
    whole = Box.of_size(height, width)
    pool = DecodePool(samples, workers, slots=AHEAD * workers, slot_bytes=3 * whole.area, at_a_time=AT_A_TIME)
    try:
        while not pool.collect():
            pool.wait(1.0)  # a worker has started
        begin = time.perf_counter()
        prepare(pool, len(samples), epochs, whole)
        return whole.area * len(samples) * epochs / 1e6 / (time.perf_counter() - begin)
    finally:
        pool.close()


def prepare(pool: DecodePool, images: int, epochs: int, whole: Box) -> None:
    """Prepare each image once an epoch, in order, as many ahead as the pool has slots."""
    submitted, total = 0, images * epochs
    for number in range(total):
        while submitted < total and pool.has_free_slot:
            pool.submit(submitted, 0, submitted % images, (whole,))
            submitted += 1
        while pool.parts(number) is None:
            if not pool.collect():
                pool.wait(1.0)
        pool.release(number)


if __name__ == "__main__":
    main()
