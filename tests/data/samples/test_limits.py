"""Values that are exactly at a limit, and what holds where nothing is said: spellings, grids, seeds."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data.csv_table import read_table
from data.samples import dataset as dataset_module
from data.samples.augment import Augment, Variation
from data.samples.colours import reinhard, slide_colours
from data.samples.colours.density_mix import density_table, mixed_densities, value_table
from data.samples.colours.reinhard import LabStatistics
from data.samples.colours.slide_colours import glass_of, stains_of
from data.samples.colours.stain_normalisation import StainNormalisation, as_scanned_text
from data.samples.coverage import check_coverage
from data.samples.dataset import SlideDataset, SlideRef, select_slides
from data.samples.label_sets import load_label_sets
from data.samples.labels import Labels, load_labels, named_entries
from data.samples.numbers import load_numbers
from data.samples.pack import Shelves, components, corners_of, overlapping, place_all, place_most
from data.samples.splits import load_splits
from data.samples.strata import fixed_groups, strata_of
from data.samples.survival_times import load_survival
from data.samples.trained import trained_range
from data.samples.trained.trained_range import SlideFigures, StainRange, TrainedRange
from data.samples.view import View, make_view, make_views
from data.store.slide_store import StoreLevel
from data.store.tissue_grid import TissueGrid
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box

GLASS = np.full(3, 240, np.float32)


def test_pixels_just_as_dense_as_stained_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    tissue = np.random.default_rng(2).integers(50, 150, (3, 1000), dtype=np.uint8)
    least = float(reinhard._densities(tissue, GLASS).min())
    monkeypatch.setattr(reinhard, "STAINED_DENSITY", least)
    assert LabStatistics.of([tissue], GLASS) is not None
    monkeypatch.setattr(reinhard, "STAINED_DENSITY", float(np.nextafter(np.float32(least), np.float32(9))))
    assert LabStatistics.of([tissue], GLASS) is None


def test_stains_need_a_larger_angle_than_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    stains = {"haematoxylin": [1.0, 0.0, 0.0], "eosin": [0.8, 0.6, 0.0], "strength": [0.1, 0.1]}
    degrees = float(np.degrees(np.arccos(0.8)))
    for least, found in ((8.0, True), (degrees, False), (degrees - 1e-6, True)):
        monkeypatch.setattr(slide_colours, "_LEAST_DEGREES", least)
        assert (stains_of(SimpleNamespace(attributes={"stains": stains})) is not None) == found


@pytest.mark.parametrize(("width", "reads"), [(4096, 1), (4097, 32)])
def test_a_level_of_2_to_24_pixels_is_read_whole(width: int, reads: int) -> None:
    boxes = []

    class Slide:
        levels = (StoreLevel(4096, width, (8.0, 8.0), "0"),)

        def read(self, box: Box, level: int = 0) -> np.ndarray:
            boxes.append(box)
            return np.broadcast_to(np.uint8(241), (3, *box.shape))

        def tissue(self) -> Any: ...

    assert np.abs(glass_of(Slide()) - 241).max() <= 2
    assert len(boxes) == reads and 0.97 * 2**24 < sum(box.area for box in boxes) <= 2**24


def test_five_slides_as_scanned_are_all_named() -> None:
    assert "more" not in as_scanned_text([*"abcde"]) and "and 1 more" in as_scanned_text([*"abcdef"])
    assert named_entries([(1, "a"), (2, "b"), (3, "c")]) == "a (line 1), b (line 2), c (line 3)"
    assert named_entries([(k, "a") for k in range(4)]).endswith("a (line 2) and 1 more")


class Halves:
    """Slides of which an image shows one half, however large it is; twice the size shows all."""

    size_px, align_px = (64, 64), 64

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def view(self, index: int) -> View:
        return View(self.size_px, (), 0.5, 0, ("cropped",))

    def coverage(self, index: int) -> Any:
        return dataset_module.Coverage(f"s{index}", "", 0.5, 0, (), 0)


def test_slides_that_show_just_enough_are_not_listed_and_fifty_are_at_most() -> None:
    check_coverage(Halves(1), 0.5)  # type: ignore[arg-type]
    for count, listed, more in ((50, 50, False), (51, 50, True)):
        with pytest.raises(RequestError) as told:
            check_coverage(Halves(count), 0.51)  # type: ignore[arg-type]
        assert str(told.value).count("\n  s") == listed and ("… and 1 more" in str(told.value)) == more


class Plain:
    """A slide of one level whose both sides have their own mpp."""

    def __init__(self, mpp: tuple[float, float]) -> None:
        self.levels = (StoreLevel(64, 64, mpp, "0"),)

    def tissue(self, mpp_um: float | None = None) -> tuple[np.ndarray, tuple[float, float]]:
        return np.ones((8, 8), bool), (self.levels[0].mpp[0] * 8, self.levels[0].mpp[1] * 8)


def images(mpp: tuple[float, float], **given: Any) -> SlideDataset:
    return SlideDataset(Path(), [SlideRef("s")], size_px=64, mpp=1.0, opener=lambda _: Plain(mpp), **given)  # type: ignore[arg-type, return-value]


def test_levels_and_reads_at_their_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert images((1.0199, 0.9801)).level(0) == 0
    for mpp in ((1.0201, 1.0), (1.0, 0.9799)):
        with pytest.raises(RequestError, match=r"data.mpp: given 1; slide s has levels"):
            images(mpp).level(0)
    monkeypatch.setattr(dataset_module, "MPP_TOLERANCE", 0.25)
    assert images((1.25, 1.0)).level(0) == 0
    assert (images((1.0, 1.0)).align_px, images((1.0, 1.0)).seed) == (64, 0)
    assert images((1.0, 1.0)).reads_at_a_time == 1
    monkeypatch.setattr(dataset_module, "is_far", lambda _: True)
    counts = []
    for side in (64, 3344, 3345, 5000, 20000):  # of 3344, eight take less than 2 to 28 bytes
        far = images((1.0, 1.0))
        far.size_px = (side, side)
        counts.append(far.reads_at_a_time)
    assert counts == [8, 8, 7, 3, 2]
    for names, more in (("a", "slide a;"), ("ab", "slide a and 1 more;")):
        with pytest.raises(RequestError, match=more):
            SlideDataset(tmp_path, [SlideRef(name) for name in names], size_px=64, mpp=1.0)


def test_boxes_that_touch_do_not_overlap_and_those_that_fill_an_image_fit() -> None:
    spans = [(a, b) for a, b in product(range(4), range(1, 5)) if a < b]
    for (a, b), (c, d) in product(spans, spans):
        meet = bool(set(range(a, b)) & set(range(c, d)))
        assert overlapping(corners_of([Box(a, b, 0, 1)]), Box(c, d, 0, 1)).tolist() == [meet]
        assert overlapping(corners_of([Box(0, 1, a, b)]), Box(0, 1, c, d)).tolist() == [meet]
    whole = [Box(0, 8, 0, 4), Box(0, 8, 4, 8)]
    assert place_all(whole, (8, 8), 4) == [(whole[0], (0, 0)), (whole[1], (0, 4))]
    assert place_all([*whole, Box(9, 10, 0, 1)], (8, 8), 4) is None
    assert place_most(whole, [1, 2], (8, 8), 4) == [(whole[0], (0, 0)), (whole[1], (0, 4))]
    shelves = Shelves(6, 8, 4)
    assert [shelves.place(4, 4), shelves.place(4, 4), shelves.place(2, 8), shelves.place(1, 1)] == [
        (0, 0),
        (0, 4),
        (4, 0),
        None,
    ]
    apart = np.zeros((5, 9), bool)
    apart[0, :3] = apart[2, :3] = apart[0:5, 5] = apart[4, 5:9] = apart[0, 7] = True
    assert components(apart) == [Box(0, 1, 0, 3), Box(0, 5, 5, 9), Box(2, 3, 0, 3)]


def test_views_at_their_limits() -> None:
    def grid(mask: np.ndarray) -> TissueGrid:
        return TissueGrid.under(mask, (1.0, 1.0), mask.shape, (1.0, 1.0))

    mask = np.zeros((200, 300), bool)
    mask[10:190, 10:290] = True
    size = (128, 192)
    assert make_view(grid(mask), size) == make_view(grid(mask), size, "pack", 64) != make_view(grid(mask), size, "crop")
    assert make_views(grid(mask), size) == make_views(grid(mask), size, "pack", 64)
    assert make_view(grid(mask), (64, 64), "pack", 64).flags == ("cropped",)
    assert make_view(grid(mask[:8, :12]), (8, 12), "pack", 1).flags == ("no_tissue",)
    for wrong in ((64, 63), (63, 64)):
        with pytest.raises(RequestError, match="at least align_px = 64"):
            make_view(grid(mask), wrong)
    with pytest.raises(RequestError, match="at least align_px = 0"):
        make_view(grid(mask), size, "pack", 0)
    # Two halves apart: as many pixels of tissue as the image has, which all fit.
    apart = np.zeros((16, 40), bool)
    apart[:, :8] = apart[:, 32:] = True
    view = make_view(grid(apart), (16, 16), "pack", 4)
    assert (view.flags, view.coverage, view.tissue_px) == ((), 1.0, 256)


def test_a_half_is_no_mirror_and_nothing_said_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.samples.augment.keyed_uniforms", lambda count, *_: np.full(count, 0.5))
    drawn = Augment().draw(0, 0, "s", (4, 4))
    assert (drawn.mirror, drawn.turns, drawn.stains, drawn.density, drawn.contrast) == (False, 2, (1.0, 1.0), 1.0, 1.0)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 6), dtype=np.uint8)
    same = Variation((4, 6)).apply(pixels)
    assert np.array_equal(same, pixels) and not np.shares_memory(same, pixels)


def test_colours_stay_the_same_from_version_to_version() -> None:
    """Steps of 8 / 8192: a run that is continued, or repeated elsewhere, sees the same images."""
    assert density_table()[[0, 1, 127, 255]] == pytest.approx([5678.2617, 4968.479, 709.7827, 0.0], abs=1e-3)
    assert len(value_table()) == 8192 and value_table()[[0, 1, 3, 4, 1024, 5000]].tolist() == [
        255,
        255,
        254,
        254,
        93,
        1,
    ]
    grey = np.arange(256, dtype=np.uint8)[None].repeat(3, 0)
    assert np.array_equal(mixed_densities(grey, density_table(), np.eye(3, dtype=np.float32), value_table()), grey)


def test_figures_at_the_limit_of_stains_and_of_hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = TrainedRange({"area_mm2": (1.0, 1.0)}, {"eosin": StainRange((1.0, 0.0, 0.0), 0.0)})
    across = SlideFigures(stains={"eosin": (0.0, 1.0, 0.0)})
    assert len(trained.describe_outside(across)) == 1
    monkeypatch.setattr(trained_range, "_STAIN_DEGREES", 90.0)
    assert trained.describe_outside(across) == []
    assert [trained.describe_outside(SlideFigures(area))[0].split()[0] for area in (99.0, 100.0, 1234.0)] == [
        "99",
        "100",
        "1,234",
    ]


LOADERS: list[tuple[str, Callable[..., Any]]] = [
    ("x,y", lambda path, **given: load_label_sets(path, ["x", "y"], **given)),
    ("x,y", lambda path, **given: load_labels(path, "x", **given)),
    ("x,y", lambda path, **given: load_numbers(path, "x", **given)),
    ("x,y", lambda path, **given: load_survival(path, "x", "y", **given)),
    ("split,y", load_splits),
]


@pytest.mark.parametrize(("head", "load"), LOADERS, ids=["sets", "classes", "numbers", "survival", "splits"])
def test_spellings_of_a_name_are_joined_only_if_it_is_said(tmp_path: Path, head: str, load: Callable[..., Any]) -> None:
    value, other = ("train", "val") if head.startswith("split") else ("1", "0")
    path = tmp_path / "labels.csv"
    path.write_text(f"slide_id,{head}\nab,{value},1\nAB,{value},1\nc,{other},0\n")
    with pytest.raises(RequestError, match="differ only in case"):
        load(path)
    joined = load(path, merge_alike=True)
    assert len(joined if isinstance(joined, dict) else joined.indices) == 2


def test_three_words_of_yes_and_no_are_no_column_of_one_label(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    for values, words in ((["1", "0"], "name all columns of yes and no"), (["1", "0", "yes"], "task: multiclass")):
        path.write_text("slide_id,x\n" + "".join(f"s{k},{value}\n" for k, value in enumerate(values)))
        with pytest.raises(RequestError, match=words):
            load_label_sets(path, ["x"])


def test_columns_that_a_table_has_not_are_named_with_what_they_are_for(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("slide_id,x,y\na,1,1\nb,0,0\n")
    table = read_table(path, "labels")
    tried: list[tuple[Callable[[], Any], str]] = [
        (lambda: load_label_sets(path, ["x", "z"]), "a label of each slide: data.target"),
        (lambda: load_labels(path, "z"), "the class of each slide: data.target"),
        (lambda: load_numbers(path, "z"), "the number of each slide: data.target"),
        (lambda: load_survival(path, "z", "y"), "the time of each slide: the first of data.target"),
        (lambda: load_survival(path, "x", "z"), "whether the time ended with the event: the second of data.target"),
        (lambda: load_splits(path, column="z"), "train, val or test: data.split_column"),
        (lambda: strata_of(table, ["x", "z"]), "--stratify"),
        (lambda: fixed_groups(table, ["a", "b"], "z=1"), "--fixed-test"),
    ]
    for load, purpose in tried:
        with pytest.raises(RequestError, match=re.escape(f"no column 'z' ({purpose}")):
            load()


def test_slides_of_one_case_of_the_labels_are_in_one_split_even_those_that_the_store_lacks() -> None:
    rows = [{"status": "done", "slide_id": name, "case_id": ""} for name in "ab"]
    splits = {"a": "train", "b": "val"}
    assert [slide.slide_id for slide in select_slides(rows, None, splits, "val")] == ["b"]
    known = Labels("x", "slide_id", ("p", "q"), {"a": 0, "b": 1, "t": 1}, cases={"a": "c", "t": "c"})
    with pytest.raises(RequestError, match="case c is in two splits"):
        select_slides(rows, known, {**splits, "t": "test"})


class Pixels(Plain):
    """Random pixels of 512 x 512; two pieces of tissue far apart."""

    def __init__(self) -> None:
        super().__init__((1.0, 1.0))
        self.levels = (StoreLevel(512, 512, (1.0, 1.0), "0"),)
        self.pixels = np.random.default_rng(0).integers(0, 255, (3, 512, 512), dtype=np.uint8)

    def tissue(self, mpp_um: float | None = None) -> tuple[np.ndarray, tuple[float, float]]:
        mask = np.zeros((64, 64), bool)
        mask[2:12, 2:12] = mask[40:60, 40:60] = True
        return mask, (8.0, 8.0)

    def read(self, box: Box, level: int = 0, threads: int = 1, out: np.ndarray | None = None) -> np.ndarray:
        assert out is not None
        out[...] = self.pixels[(slice(None), *box.slices())]
        return out


@pytest.mark.parametrize("side", [512, 128])
def test_views_together_show_all_tissue_of_a_slide(side: int) -> None:
    source = Pixels()
    slides = SlideDataset(Path(), [SlideRef("s")], size_px=side, mpp=1.0, opener=lambda _: source, align_px=32)  # type: ignore[arg-type, return-value]
    view = slides.view(0)
    one, several = slides.whole_views(0, several=False), slides.whole_views(0, several=True)
    assert len(one) == 1 and one[0].coverage == 1.0 and sum(part.coverage for part in several) == pytest.approx(1.0)
    if side == 512:
        assert one == several == (view,)
    else:
        assert view.flags == ("cropped",) and one[0].size_px == slides.coverage(0).fits_size_px
        assert len(several) > 1 and {part.size_px for part in several} == {(side, side)}
        grid = TissueGrid.under(*source.tissue(), (512, 512), (1.0, 1.0))
        assert several == make_views(grid, (side, side), "pack", 32)
    out = np.zeros((3, 100, 90), np.uint8)
    slides.read_plain_into(0, Box(10, 110, 20, 110), out)
    assert np.array_equal(out, slides.read_plain(0, Box(10, 110, 20, 110)))
    normalised = SlideDataset(Path(), [SlideRef("s")], size_px=side, mpp=1.0, opener=lambda _: source, align_px=32)  # type: ignore[arg-type, return-value]
    normalised._colour_maps[0], normalised.stain = (lambda pixels: 255 - pixels), StainNormalisation.of("macenko")  # type: ignore[assignment]
    normalised.read_plain_into(0, Box(10, 110, 20, 110), out)
    assert np.array_equal(out, 255 - slides.read_plain(0, Box(10, 110, 20, 110)))


def test_a_window_beyond_the_level_is_left_out() -> None:
    """A mask may reach a little further than the level, by rounding."""

    class Slide:
        levels = (StoreLevel(64, 64, (1.0, 1.0), "0"),)

        def read(self, box: Box, level: int = 0) -> np.ndarray:
            return np.zeros((3, *box.shape), np.uint8)

        def tissue(self) -> tuple[np.ndarray, tuple[float, float]]:
            mask = np.zeros((40, 40), bool)
            mask[2, 2] = mask[39, 39] = True
            return mask, (8.0, 8.0)

    assert [window.shape for window in slide_colours.tissue_windows(Slide())] == [(3, 64)]


def test_a_size_that_shows_less_than_a_smaller_one_is_passed_over() -> None:
    """Of two slides, one is shown by sizes of 128 and from 256 on, the other from 192 on."""

    class Slides(Halves):
        def coverage_at(self, index: int, size_px: tuple[int, int]) -> float:
            return float(size_px[0] >= 192 if index else size_px[0] == 128 or size_px[0] >= 256)

        def coverage(self, index: int) -> Any:
            return dataset_module.Coverage(f"s{index}", "", 0.5, 9, (), 0, (320, 320), 2.5)

    with pytest.raises(RequestError, match=r"data.size_px=\[256,256\] shows enough of every slide"):
        check_coverage(Slides(2), 0.9)  # type: ignore[arg-type]


def test_rows_without_a_name_and_without_a_value_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("slide_id,x\na,1\n,\nb,0\n")
    assert list(load_labels(path, "x").indices) == ["a", "b"]
