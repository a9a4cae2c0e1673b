"""A dataset of training images, one for each slide: reads any box of any image, with or without augmentation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from data.location import each, is_far, is_remote, location
from data.samples.augment import Augment, Variation
from data.samples.colours.slide_colours import stains_of
from data.samples.colours.stain_normalisation import ColourMap, StainNormalisation
from data.samples.coverage import COVERAGE_COLUMNS, Coverage, check_coverage, coverage_of, write_coverage
from data.samples.labels import Labels, Target, with_cases
from data.samples.names import refuse_content_in_two_splits
from data.samples.splits import check_cases
from data.samples.view import BACKGROUND, View, ViewKind, make_view, make_views
from data.store.manifest import same_content
from data.store.slide_store import SlideStore, StoreLevel, slide_path
from data.store.tissue_grid import TissueGrid
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box

__all__ = ["COVERAGE_COLUMNS", "SlideDataset", "SlideRef", "check_coverage", "select_slides", "write_coverage"]

MPP_TOLERANCE = 0.02
MOST_AT_A_TIME = 8
"""Most images that a process reads at a time."""
_READ_AHEAD_BYTES = 2**28
"""Most bytes of the images that a process reads at a time; it may always read two."""


class SlideReader(Protocol):
    """An open slide of a dataset; :class:`data.store.slide_store.SlideStore` implements it."""

    @property
    def levels(self) -> tuple[StoreLevel, ...]:
        """The pyramid, finest first."""
        ...

    def read(
        self, box: Box, level: int = 0, threads: int = 1, out: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """Return the pixels of a box, (3, h, w), in ``out`` if it is given."""
        ...

    def tissue(self, mpp_um: float | None = None) -> tuple[NDArray[np.bool_], tuple[float, float]]:
        """Return the tissue mask and its mpp (y, x)."""
        ...


class _ViewFactory(Protocol):
    """Makes views of one slide."""

    def __call__(self, size_px: tuple[int, int], mpp_factor: float) -> View:
        """Return the view of an image of this size (height, width), at ``mpp_factor`` times the dataset's mpp."""
        ...


@dataclass(frozen=True)
class SlideRef:
    """A slide of a dataset: its id in the store, its case, and its label (None: unlabelled)."""

    slide_id: str
    case_id: str = ""
    label: Target | None = None


class SlideDataset:
    """Training images of one size, one for each slide. Several threads may read at a time.

    Slides are opened and views created on first use, then cached.

    Attributes:
        samples: The slides, in the order given.
        size_px: (height, width) of every image.
        stain: Normalisation of each slide's colours; None: none.
    """

    def __init__(
        self,
        store: Path,
        slides: Sequence[SlideRef],
        *,
        size_px: int | tuple[int, int],
        mpp: float,
        view: ViewKind = "pack",
        align_px: int = 64,
        seed: int = 0,
        augment: Augment | None = None,
        stain: StainNormalisation | None = None,
        opener: Callable[[Path], SlideReader] | None = None,
    ) -> None:
        """Create the dataset; only checks that the slides exist.

        Args:
            store: Folder of the ``<slide_id>.zarr``.
            slides: The samples.
            size_px: Height and width of every image; an int means square.
            mpp: Microns per pixel of the images; each slide must have a level of this mpp, within 2 %.
            view: ``pack`` or ``crop``, see :func:`data.samples.view.make_view`.
            align_px: Grid to which pieces of tissue are aligned.
            seed: Seed of the augmentation, together with epoch and slide.
            augment: Ranges of the augmentation; None: no augmentation.
            stain: Normalisation of each slide's colours, before augmentation; None: none.
            opener: Opens ``STORE/<slide_id>.zarr``; default: as a stored slide, whose files `check_files` checks.

        Raises:
            RequestError: A slide is not in the store, or occurs twice in ``slides``.
        """
        self.samples = tuple(slides)
        self.size_px = (size_px, size_px) if isinstance(size_px, int) else (int(size_px[0]), int(size_px[1]))
        self.mpp, self.kind, self.align_px, self.seed = mpp, view, align_px, seed
        self._store, self._augment, self._opener, self.stain = location(store), augment, opener, stain
        self._colour_maps: dict[int, ColourMap | None] = {}
        self._slides: dict[int, SlideReader] = {}
        self._views: dict[int, View] = {}
        self._check_slides()

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    @property
    def reads_at_a_time(self) -> int:
        """Images that a process should read at a time: one from a local disk, several from a network.

        Small images take longer to arrive than to decode, so more of them are read at a time. Of large images two are
        read at a time; more only if they take at most 256 MB together.
        """
        image_bytes = 3 * self.size_px[0] * self.size_px[1]
        return min(MOST_AT_A_TIME, max(2, _READ_AHEAD_BYTES // image_bytes)) if is_far(self._store) else 1

    def view(self, index: int) -> View:
        """Return the view of an image; the sources of its pieces are boxes of the slide's :meth:`level`.

        Raises:
            RequestError: The slide has no level of the dataset's mpp, or the image is smaller than ``align_px``.
        """
        # Without a lock: threads that come at the same time make equal views, and one of them stays.
        if index not in self._views:
            self._views[index] = self._view_factory(index)(self.size_px, mpp_factor=1.0)
        return self._views[index]

    def whole_views(self, index: int, *, several: bool) -> tuple[View, ...]:
        """Return views that together show all tissue of a slide; only :meth:`view` if that shows all.

        Args:
            index: Index of the sample.
            several: True: several views of the dataset's size; False: one view, as large as needed.

        Raises:
            RequestError: As :meth:`view`.
        """
        view = self.view(index)
        if "cropped" not in view.flags:
            return (view,)
        if several:
            level = self.slide(index).levels[self.level(index)]
            mask, mask_mpp = self.slide(index).tissue()
            size = (level.height_px, level.width_px)
            tissue = TissueGrid.under(mask, mask_mpp, size, level.mpp)
            return make_views(tissue, self.size_px, self.kind, self.align_px)
        fits = self.coverage(index).fits_size_px
        assert fits is not None, "the coverage of a cropped view has a size that fits"
        return (self._view_factory(index)(fits, mpp_factor=1.0),)

    def level(self, index: int) -> int:
        """Return the level of the slide's pyramid that has the dataset's mpp.

        Raises:
            RequestError: No level has it within 2 %; the message names the slide and the mpp of its levels.
        """
        levels = self.slide(index).levels
        # The larger deviation of y and x: pixels that are not square would stretch the image.
        off = [max(abs(side / self.mpp - 1) for side in level.mpp) for level in levels]
        best = int(np.argmin(off))
        if off[best] > MPP_TOLERANCE:
            has = ", ".join(f"{level.mpp[0]:g}" for level in levels)
            raise RequestError(
                f"data.mpp: given {self.mpp:g}; slide {self.samples[index].slide_id} has levels of {has} µm/px; use "
                f"one of these, or ingest with `hyfi ingest --mpp {self.mpp:g}`"
            )
        return best

    def slide(self, index: int) -> SlideReader:
        """Return the open slide of a sample."""
        if index not in self._slides:
            path = slide_path(self._store, self.samples[index].slide_id)
            # Do not check files here: on object storage, a request for each is slow. `check_files` checks all once.
            opened = SlideStore.open(path, check_files=False) if self._opener is None else self._opener(path)
            self._slides[index] = opened
        return self._slides[index]

    def check_files(self) -> None:
        """Check that every file of the stored slides exists and has its size.

        Raises:
            StoreError: One does not.
        """

        def check(index: int) -> None:
            slide = self.slide(index)
            if isinstance(slide, SlideStore):
                slide.check_files()

        each(check, range(len(self)), self._store)

    def colour_map(self, index: int) -> ColourMap | None:
        """Return the stain normalisation of a slide, measured once; None: its pixels are as scanned.

        Raises:
            StoreError: A file of the store is missing or damaged.
            RequestError: See `StainNormalisation.of_slide`.
        """
        if self.stain is not None and index not in self._colour_maps:
            measured = self.stain.of_slide(self.slide(index), self.samples[index].slide_id)
            self._colour_maps[index] = measured
        return self._colour_maps.get(index)

    def as_scanned(self) -> list[str]:
        """Return the names of slides that stain normalisation leaves as they are: it cannot measure their stains."""
        if self.stain is None:
            return []
        return [one.slide_id for index, one in enumerate(self.samples) if stains_of(self.slide(index)) is None]

    def variation(self, index: int, epoch: int | None) -> Variation | None:
        """Return the augmentation of an image in an epoch; None: no augmentation."""
        if epoch is None or self._augment is None:
            return None
        return self._augment.draw(self.seed, epoch, self.samples[index].slide_id, self.size_px)

    def read(self, index: int, box: Box, epoch: int | None = None) -> NDArray[np.uint8]:
        """Return a box of a training image, (3, h, w) uint8 that the caller owns; 255 outside the slide.

        The pixels do not depend on how an image is divided into boxes. Only the pieces in the box are read. Memory:
        twice the box.

        Args:
            index: Index of the sample.
            box: Pixels of the (augmented) image; may extend beyond its border.
            epoch: Key of the augmentation, together with seed and slide; None: no augmentation.

        Raises:
            StoreError: A shard is missing or damaged.
        """
        return self.vary(index, epoch, self.read_plain(index, self.source(index, box, epoch)))

    def source(self, index: int, box: Box, epoch: int | None) -> Box:
        """Return the box of the original image that augmentation turns into ``box``."""
        variation = self.variation(index, epoch)
        return box if variation is None else variation.source(box)

    def vary(self, index: int, epoch: int | None, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the augmented pixels of a box, (3, h, w) uint8, given those of its :meth:`source`.

        The result is a new array, or ``pixels`` itself if there is no augmentation; ``pixels`` is not changed.
        """
        variation = self.variation(index, epoch)
        return pixels if variation is None else variation.apply(pixels)

    def coverage_table(self) -> list[dict[str, Any]]:
        """Return the rows of ``coverage.csv``: how much of each slide's tissue its image shows.

        Where that is not all, images of ``fits_size_px`` and ``fits_mpp`` have been tried, and show all.
        """
        return [self.coverage(index).row() for index in range(len(self))]

    def coverage(self, index: int) -> Coverage:
        """Return the coverage of an image, with the size and mpp that would show all tissue."""
        sample = self.samples[index]
        view_factory = cache(lambda: self._view_factory(index))  # made only if the view is cropped

        def holds_all(size_px: tuple[int, int], mpp_factor: float) -> bool:
            return "cropped" not in view_factory()(size_px, mpp_factor).flags

        return coverage_of(sample.slide_id, sample.case_id, self.view(index), self.mpp, self.align_px, holds_all)

    def coverage_at(self, index: int, size_px: tuple[int, int]) -> float:
        """Return the coverage of an image of ``size_px`` (height, width) of the slide."""
        return self._view_factory(index)(size_px, mpp_factor=1.0).coverage

    def read_plain(self, index: int, box: Box) -> NDArray[np.uint8]:
        """Return a box of a training image without augmentation, (3, h, w) uint8 that the caller owns."""
        return self.read_view(index, self.view(index), box)

    def read_plain_into(self, index: int, box: Box, out: NDArray[np.uint8]) -> None:
        """Fill ``out``, (3, h, w) of any strides, with a box of a training image without augmentation."""
        self._fill(index, self.view(index), box, out)
        # Also the background: white stays white.
        if (colours := self.colour_map(index)) is not None:
            out[...] = colours(out)

    def read_view(self, index: int, view: View, box: Box) -> NDArray[np.uint8]:
        """Return a box of the image that ``view`` describes, (3, h, w) uint8 that the caller owns.

        Colours are normalised, see :meth:`colour_map`.
        """
        pixels = np.empty((3, *box.shape), np.uint8)
        self._fill(index, view, box, pixels)
        colours = self.colour_map(index)
        return pixels if colours is None else colours(pixels)

    def _fill(self, index: int, view: View, box: Box, out: NDArray[np.uint8]) -> None:
        """Fill ``out`` with a box of a view: pieces of the slide on background."""
        pieces = list(view.to_slide(box))
        # Pieces do not overlap, so they cover the box if their areas add up to its area: no background to paint.
        if sum(piece.target.intersect(box).area for piece in pieces) < box.area:
            out[...] = BACKGROUND
        for piece in pieces:
            rows, columns = piece.target.relative_to(box).slices()
            self.slide(index).read(piece.source, self.level(index), out=out[:, rows, columns])

    def _view_factory(self, index: int) -> _ViewFactory:
        """Return a function that makes views of the slide in other sizes of the image, or at another mpp."""
        level = self.slide(index).levels[self.level(index)]
        mask, mask_mpp = self.slide(index).tissue()

        def make(size_px: tuple[int, int], mpp_factor: float) -> View:
            # The same slide in fewer pixels, rounded up so that the last row and column stay.
            slide_px = (ceil(level.height_px / mpp_factor), ceil(level.width_px / mpp_factor))
            mpp = (level.mpp[0] * mpp_factor, level.mpp[1] * mpp_factor)
            return make_view(TissueGrid.under(mask, mask_mpp, slide_px, mpp), size_px, self.kind, self.align_px)

        return make

    def _check_slides(self) -> None:
        """Refuse slides that are listed twice or are not in the store."""
        names: set[str] = set()
        for sample in self.samples:
            if sample.slide_id in names:
                raise RequestError(f"slide {sample.slide_id} is listed twice")
            names.add(sample.slide_id)
        # On object storage, only `check_files` looks for files, once, and not every process.
        if self._opener is None and not is_remote(self._store):
            missing = [s.slide_id for s in self.samples if not slide_path(self._store, s.slide_id).is_dir()]
            if missing:
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                raise RequestError(f"store {self._store} has no slide {missing[0]}{more}; run `hyfi ingest` first")


def select_slides(
    rows: Iterable[Mapping[str, str]],
    labels: Labels | None = None,
    splits: Mapping[str, str] | None = None,
    split: str | None = None,
) -> tuple[SlideRef, ...]:
    """Return the slides of a store that are done, labelled and in a split, in the manifest's order.

    Args:
        rows: Rows of the store's manifest.
        labels: Slides without a label are left out. None: all slides, unlabelled.
        splits: Slide to split (:func:`data.samples.splits.load_splits`).
        split: The split to return; None: all slides.

    Raises:
        RequestError: A case is in two splits, or slides with the same content are. This uses the cases of ``rows`` and
            ``labels``, which the file of the splits may not have.
    """
    chosen = []
    rows = with_cases(rows, labels)
    check_cases(splits or {}, {row["slide_id"]: row["case_id"] for row in rows})
    check_cases(splits or {}, labels.cases if labels else {})  # also of slides that the store does not have
    refuse_content_in_two_splits(same_content(rows), splits or {})
    for row in rows:
        slide, case = row["slide_id"], row["case_id"]
        label = labels.of(slide, case) if labels else None
        in_split = split is None or (splits or {}).get(slide) == split
        if row.get("status", "done") == "done" and in_split and (labels is None or label is not None):
            chosen.append(SlideRef(slide, case or slide, label))
    return tuple(chosen)
