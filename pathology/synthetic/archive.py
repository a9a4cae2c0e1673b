"""Synthetic archives: cases, labels and splits of slides, and their files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.files import write_atomically
from hyfi_core.collection import start_quickly
from hyfi_core.errors import RequestError
from pathology.synthetic.anatomy import SlideSpec, focus_boxes
from pathology.synthetic.placing import make_anatomy
from pathology.synthetic.tiff import write_slide

NEGATIVE, POSITIVE = "benign", "malignant"
SMALLEST_PX, LARGEST_PX = 512, 200_000
COLUMNS = ("path", "slide_id", "case_id", "label", "split", "source_mpp", "months", "died")
_SPLIT_FRACTIONS = (("test", 0.4), ("val", 0.1))  # fractions of the slides of each label; the others are for training
_MEAN_MONTHS = (60.0, 12.0)  # to the death of cases that are benign, malignant
_FOLLOWED_MONTHS = (12.0, 72.0)  # shortest and longest time that a case is followed


@dataclass(frozen=True)
class ArchiveSlide:
    """One slide of an archive, with its row of the manifest.

    Attributes:
        spec: What is drawn.
        split: ``train``, ``val`` or ``test``.
        months: Time that the case was followed; malignant cases die earlier.
        died: Whether it ended with death.
    """

    spec: SlideSpec
    split: str
    months: float = 0.0
    died: bool = False

    @property
    def slide_id(self) -> str:
        """Name of the slide, which is that of its file without the extension."""
        return f"slide-{self.spec.index:04d}"

    @property
    def row(self) -> dict[str, str]:
        """Row of the manifest, with the keys ``COLUMNS``."""
        return {
            "path": f"{self.slide_id}.tiff",
            "slide_id": self.slide_id,
            "case_id": f"case-{self.spec.case:04d}",
            "label": POSITIVE if self.spec.positive else NEGATIVE,
            "split": self.split,
            "source_mpp": f"{self.spec.mpp_um:g}",
            "months": f"{self.months:.1f}",
            "died": f"{int(self.died)}",
        }


def lay_out_archive(
    slides: int, size_px: int, seed: int = 0, *, mpp_um: float = 0.5, pen: bool = False, blur: bool = False
) -> list[ArchiveSlide]:
    """Return the slides of an archive; the same arguments give the same archive.

    Cases have one to three slides, one label, and one time, which ends with death or is censored; malignant cases die
    five times earlier on average. Labels are balanced over slides. About 40 % of the slides of each label are for
    testing and 10 % for validation; a case is in one split only.

    Args:
        slides: Number of slides.
        size_px: Height and width of each slide.
        seed: Not negative.
        mpp_um: Microns per pixel.
        pen: Whether slides have pen marks.
        blur: Whether slides have an area out of focus.

    Raises:
        RequestError: Number, size or seed is out of range.
    """
    if slides < 1:
        raise RequestError(f"--slides is {slides}; use at least 1")
    if not SMALLEST_PX <= size_px <= LARGEST_PX:
        raise RequestError(f"--size is {size_px} pixels; use {SMALLEST_PX} to {LARGEST_PX}")
    if seed < 0:
        raise RequestError(f"--seed is {seed}; use a whole number ≥ 0")
    rng = np.random.default_rng([seed, 77])
    cases = _cases(rng, slides)
    splits = _splits(rng, cases)
    # A generator of its own, so that cases and splits do not depend on the times.
    times = _survival(np.random.default_rng([seed, 78]), cases)
    planned: list[ArchiveSlide] = []
    for case, (count, positive) in enumerate(cases):
        for _ in range(count):
            spec = SlideSpec(seed, len(planned), case, size_px, positive, mpp_um, pen, blur)
            planned.append(ArchiveSlide(spec, splits[case], *times[case]))
    return planned


def _cases(rng: np.random.Generator, slides: int) -> list[tuple[int, bool]]:
    """Return (number of slides, positive) of each case; each case gets the label that has fewer slides so far."""
    cases: list[tuple[int, bool]] = []
    counts = [0, 0]  # slides of each label
    while sum(counts) < slides:
        count = min(int(rng.choice([1, 2, 3], p=[0.5, 0.3, 0.2])), slides - sum(counts))
        positive = bool(rng.integers(0, 2)) if counts[0] == counts[1] else counts[1] < counts[0]
        counts[positive] += count
        cases.append((count, positive))
    return cases


def _survival(rng: np.random.Generator, cases: list[tuple[int, bool]]) -> list[tuple[float, bool]]:
    """Return (months, died) of each case."""
    means = np.array([_MEAN_MONTHS[positive] for _, positive in cases])
    death, end = rng.exponential(means), rng.uniform(*_FOLLOWED_MONTHS, len(cases))
    # Censored by whichever comes first; above 0, as no case is followed for no time.
    months = np.maximum(np.minimum(death, end), 0.1)
    return list(zip(months.round(1).tolist(), (death <= end).tolist(), strict=True))


def _splits(rng: np.random.Generator, cases: list[tuple[int, bool]]) -> list[str]:
    """Return the split of each case, such that the fractions of slides hold within each label.

    Args:
        rng: Draws the order in which cases are taken for the splits.
        cases: (number of slides, positive) of each case.
    """
    splits = ["train"] * len(cases)
    for label in (False, True):
        slides_of_case = {number: slides for number, (slides, positive) in enumerate(cases) if positive == label}
        total = sum(slides_of_case.values())
        order = iter(rng.permutation(list(slides_of_case)).tolist())
        for name, fraction in _SPLIT_FRACTIONS:
            chosen_slides = 0
            while chosen_slides < round(fraction * total):
                case = next(order)
                splits[case] = name
                chosen_slides += slides_of_case[case]
    return splits


def write_archive_slide(slide: ArchiveSlide, folder: Path, *, truth: bool = False) -> Path:
    """Render a slide into ``folder`` and return its path; an existing file is replaced.

    Args:
        slide: The slide to render.
        folder: An existing folder.
        truth: Whether to also write ``truth/<slide_id>.json`` with the boxes of the foci, ``[y0, y1, x0, x1]`` in
            level-0 pixels.

    Raises:
        OSError: The folder cannot be written.
    """
    anatomy = make_anatomy(slide.spec)
    path = folder / f"{slide.slide_id}.tiff"
    write_slide(anatomy, path)
    if truth:
        boxes = [[box.y0, box.y1, box.x0, box.x1] for box in focus_boxes(anatomy)]
        (folder / "truth").mkdir(exist_ok=True)
        text = json.dumps({"slide_id": slide.slide_id, "label": slide.row["label"], "foci": boxes})
        write_atomically(folder / "truth" / f"{slide.slide_id}.json", (text + "\n").encode())
    return path


def write_manifest(slides: list[ArchiveSlide], folder: Path) -> Path:
    """Write ``manifest.csv``, one row per slide with a path relative to ``folder``, and return its path."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(slide.row for slide in slides)
    path = folder / "manifest.csv"
    write_atomically(path, text.getvalue().encode())
    return path


def make_archive(
    slides: list[ArchiveSlide],
    folder: Path,
    *,
    workers: int = 1,
    truth: bool = False,
    finished: Callable[[Path], None] = lambda path: None,
) -> Path:
    """Render all slides, then write the manifest; return the manifest's path.

    Args:
        slides: From `lay_out_archive`.
        folder: Created if it does not exist.
        workers: Number of processes; 1 renders in this process.
        truth: See `write_archive_slide`.
        finished: Called in this process with the path of each finished slide.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if workers > 1 and len(slides) > 1:
        _render_in_processes(slides, folder, min(workers, len(slides)), truth, finished)
    else:
        for slide in slides:
            finished(write_archive_slide(slide, folder, truth=truth))
    return write_manifest(slides, folder)


def _render_in_processes(
    slides: list[ArchiveSlide], folder: Path, workers: int, truth: bool, finished: Callable[[Path], None]
) -> None:
    """Write slides with several processes; ``finished`` is called with the path of each."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=start_quickly) as pool:
        try:
            for future in as_completed([pool.submit(write_archive_slide, s, folder, truth=truth) for s in slides]):
                finished(future.result())
        except BaseException:
            # Slides that were begun are finished: a file appears whole or not at all.
            pool.shutdown(wait=True, cancel_futures=True)
            raise
