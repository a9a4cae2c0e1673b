"""Benchmark of loading from a store that is far away, against the same store on this machine's disk, in turns.

    python -m workflows.benchmarks.remote [--latency-ms 5] [--size 3072] [--image 2048] [--slides 24] [--rounds 3]

A decoding worker prepares images ahead of time, as that of a loader does: from a folder; over HTTP from a server on
loopback, which waits ``--latency-ms`` before each answer; and from the folder, where each opening and each reading of
a file waits as long, as on a network disk. The worker has one core, the server another: the server of a real store is
not on this machine. In each round and place, all images are prepared twice: cold, when every slide is opened and every
index read for the first time, and again. Prints the megapixels per second of each (medians) and, as its last lines, the
ratios to the folder, cold and open.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.location import location
from data.samples.dataset import SlideDataset, SlideRef
from data.store.slide_store import slide_path
from pathology.ingest.archive import Request, ingest
from pathology.ingest.options import IngestOptions
from pathology.synthetic.archive import lay_out_archive, write_archive_slide
from workflows.benchmarks.one_core import on_cores, preparing
from workflows.benchmarks.remote.slow_disk import SlowOpener

MPP = 0.5
DRAWN = 6
"""Slides that are drawn; others are the same under other names."""
PASSES = ("cold", "open")


def main() -> None:
    """Read the same images from a folder, from object storage and from a network disk; print the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=float, default=5.0)
    parser.add_argument("--size", type=int, default=3072, help="height and width of a slide in pixels")
    parser.add_argument("--image", type=int, default=2048, help="height and width of an image in pixels")
    parser.add_argument("--slides", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        slides = make_store(folder, args.slides, args.size)
        with running_server(folder, args.latency_ms) as address:
            sides: dict[str, SlideDataset] = {
                "folder": dataset(folder / "store", slides, args.image, None),
                "object storage": dataset(location(f"{address}/store"), slides, args.image, None),
                "network disk": dataset(folder / "store", slides, args.image, SlowOpener(args.latency_ms / 1e3)),
            }
            far_at_a_time = sides["object storage"].reads_at_a_time
            # Megapixels per second of each round: in a first pass over all slides, and in a second one.
            rates: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
            for _ in range(args.rounds):
                for side, samples in sides.items():
                    # A loader reads several images at a time from a store that is far away.
                    rates[side].append(rates_of_passes(samples, 1 if side == "folder" else far_at_a_time))
    report(rates, args.latency_ms)


def report(rates: dict[str, list[tuple[float, float]]], latency_ms: float) -> None:
    """Print the median rates, and the median of the ratios to the folder within each round.

    Args:
        rates: Store -> (cold, open) megapixels per second in each round.
        latency_ms: Milliseconds before each answer.
    """
    for side, own_rates in rates.items():
        cold, opened = (statistics.median(rate[number] for rate in own_rates) for number in range(len(PASSES)))
        print(f"{side}: cold {cold:.1f} MP/s, open {opened:.1f} MP/s")
    for number, name in enumerate(PASSES):
        ratios = {
            side: statistics.median(
                far[number] / near[number] for far, near in zip(own_rates, rates["folder"], strict=True)
            )
            for side, own_rates in rates.items()
            if side != "folder"
        }
        shown = ", ".join(f"{side} {ratio:.2f}" for side, ratio in ratios.items())
        print(f"of the folder's rate at {latency_ms:g} ms, {name}: {shown}")


def make_store(folder: Path, slides: int, size_px: int) -> tuple[SlideRef, ...]:
    """Ingest synthetic slides, at most ``DRAWN``; return ``slides`` slides of the store, the others are links."""
    (folder / "slides").mkdir()
    for slide in lay_out_archive(min(slides, DRAWN), size_px):
        write_archive_slide(slide, folder / "slides")
    ingested = ingest(Request([folder / "slides"], folder / "store", IngestOptions(mpp=MPP))).done
    names = [record.slide_id for record in ingested]
    for number in range(len(names), slides):
        names.append(f"link-{number}")
        slide_path(folder / "store", names[-1]).symlink_to(slide_path(folder / "store", names[number % len(ingested)]))
    return tuple(SlideRef(name) for name in names)


def dataset(store: Path, slides: tuple[SlideRef, ...], image_px: int, opener: SlowOpener | None) -> SlideDataset:
    """Return images of ``image_px`` of the slides."""
    return SlideDataset(store, slides, size_px=image_px, mpp=MPP, view="crop", opener=opener)


@contextmanager
def running_server(folder: Path, latency_ms: float) -> Iterator[str]:
    """Context with a server of the folder; yields its address."""
    command = [sys.executable, "-m", "workflows.benchmarks.remote.range_server", str(folder), str(latency_ms)]
    # On another core than the worker: a store that is far away would take no time of this machine.
    with on_cores(-1):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        # The server only reads files: killing it leaves nothing half written.
        process.kill()
        process.communicate()


def rates_of_passes(samples: SlideDataset, at_a_time: int) -> tuple[float, float]:
    """Return the (cold, open) rates: megapixels per second when a worker prepares all images first, and again."""
    height, width = samples.size_px
    # The first image is not counted.
    megapixels = height * width * (len(samples) - 1) / 1e6
    cold, again = preparing(samples, len(samples), (height, width), len(PASSES), at_a_time)
    return megapixels / cold.seconds, megapixels / again.seconds


if __name__ == "__main__":
    main()
