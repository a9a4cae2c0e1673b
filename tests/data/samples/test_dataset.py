from __future__ import annotations

import csv
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import StoreError
from data.samples.augment import Augment
from data.samples.dataset import COVERAGE_COLUMNS, SlideDataset, SlideRef, check_coverage, select_slides, write_coverage
from data.samples.labels import load_labels
from data.store.layout import LevelSize, pyramid_levels
from data.store.slide_store import StoreLevel
from data.store.writer import SlideWriter
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box

MASK_MPP = 8.0


@dataclass
class MemorySlide:
    """A slide in memory: noise where there is tissue, white glass elsewhere; two levels."""

    pixels: np.ndarray
    mask: np.ndarray
    reads: list[Box] = field(default_factory=list)

    @property
    def levels(self):
        height, width = self.pixels.shape[1:]
        half = StoreLevel((height + 1) // 2, (width + 1) // 2, (2.0, 2.0), "1")
        return (StoreLevel(height, width, (1.0, 1.0), "0"), half)

    def read(self, box, level=0, threads=1, out=None):
        self.reads.append(box)
        plane = self.pixels[:, :: 2**level, :: 2**level]
        assert Box.of_size(*plane.shape[1:]).contains(box)
        out = np.empty((3, *box.shape), np.uint8) if out is None else out
        out[...] = plane[(slice(None), *box.slices())]
        return out

    def tissue(self, mpp_um=None):
        return self.mask, (MASK_MPP, MASK_MPP)


def slide(seed: int, height=700, width=900, pieces=((5, 5, 20, 24), (50, 80, 25, 20))) -> MemorySlide:
    rng = np.random.default_rng(seed)
    mask = np.zeros((-(-height // 8), -(-width // 8)), bool)
    for y, x, h, w in pieces:
        mask[y : y + h, x : x + w] = True
    tissue = mask.repeat(8, 0).repeat(8, 1)[:height, :width]
    noise = rng.integers(0, 256, (3, height, width), dtype=np.uint8)
    return MemorySlide(np.where(tissue, noise, np.uint8(255)), mask)


def dataset(slides, **options) -> SlideDataset:
    settings_ = {"size_px": 384, "mpp": 1.0, "align_px": 32, "seed": 5, "augment": Augment(), **options}
    refs = [SlideRef(f"s{i}", f"c{i}", i % 2) for i in range(len(slides))]
    return SlideDataset(".", refs, opener=lambda path: slides[int(path.stem[1:])], **settings_)


def test_pieces_come_from_the_slide_and_the_rest_is_white():
    source = slide(0)
    images = dataset([source])
    view, image = images.view(0), images.read(0, Box.of_size(384, 384))
    assert len(view.pieces) >= 2 and view.coverage == 1.0
    wanted = np.full_like(image, 255)
    for piece in view.pieces:
        wanted[(slice(None), *piece.target.slices())] = source.pixels[(slice(None), *piece.source.slices())]
    assert np.array_equal(image, wanted)
    assert (image != 255).any(axis=0).sum() == (source.pixels != 255).any(axis=0).sum()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 383), max_size=4),
    st.lists(st.integers(1, 299), max_size=4),
    st.integers(0, 50),
    st.booleans(),
)
def test_boxes_of_any_partition_are_slices_of_the_whole(rows, columns, epoch, square):
    size = (384, 384 if square else 300)
    images = dataset([slide(1)], size_px=size, augment=Augment(stain=0.4, colour=0.3))
    whole = images.read(0, Box.of_size(*size), epoch)
    ys, xs = sorted({0, *rows, size[0]}), sorted({0, *columns, size[1]})
    for y0, y1 in pairwise(ys):
        for x0, x1 in pairwise(xs):
            assert np.array_equal(images.read(0, Box(y0, y1, x0, x1), epoch), whole[:, y0:y1, x0:x1])


def test_a_box_beyond_the_image_is_white_there():
    images = dataset([slide(2)])
    whole = np.pad(images.read(0, Box.of_size(384, 384), 3), ((0, 0), (10, 20), (30, 5)), constant_values=255)
    assert np.array_equal(images.read(0, Box(-10, 404, -30, 389), 3), whole)


def test_without_an_epoch_nothing_is_varied_and_epochs_differ():
    box = Box.of_size(384, 384)
    images, plain = dataset([slide(3)]), dataset([slide(3)], augment=None)
    assert np.array_equal(images.read(0, box), plain.read(0, box, 4))
    assert not np.array_equal(images.read(0, box, 0), images.read(0, box, 1))
    assert np.array_equal(images.read(0, box, 1), dataset([slide(3)]).read(0, box, 1))


def test_only_what_the_box_shows_is_read():
    source = slide(4)
    images = dataset([source])
    piece = images.view(0).pieces[0]
    source.reads.clear()
    images.read(0, Box(piece.target.y0, piece.target.y0 + 8, piece.target.x0, piece.target.x0 + 8))
    assert source.reads == [Box(piece.source.y0, piece.source.y0 + 8, piece.source.x0, piece.source.x0 + 8)]


def test_a_coarser_level_is_used_where_it_has_the_mpp():
    images = dataset([slide(5)], mpp=1.99)
    assert images.level(0) == 1
    piece = images.view(0).pieces[0]
    assert Box.of_size(350, 450).contains(piece.source)
    shown = images.read(0, piece.target)
    assert np.array_equal(shown, images.slide(0).read(piece.source, 1))


def test_an_mpp_that_no_level_has_is_refused():
    with pytest.raises(RequestError, match=r"given 1.5; slide s0 has levels of 1, 2"):
        dataset([slide(0)], mpp=1.5).view(0)


def test_a_level_has_an_mpp_if_both_of_its_sides_have_it():
    class Stretched(MemorySlide):
        levels = (StoreLevel(700, 900, (1.5, 1.0), "0"), StoreLevel(350, 450, (3.0, 2.0), "1"))

    plain = slide(0)
    with pytest.raises(RequestError, match=r"data\.mpp: given 1\.5"):
        dataset([Stretched(plain.pixels, plain.mask)], mpp=1.5).level(0)


def test_the_smaller_images_are_the_more_are_read_at_a_time_over_a_network(monkeypatch):
    def at_a_time(size_px, far):
        monkeypatch.setattr("data.samples.dataset.is_far", lambda path: far)
        return dataset([slide(1)], size_px=size_px).reads_at_a_time

    assert [at_a_time(size, True) for size in (512, 4096, 8192, 32768)] == [8, 5, 2, 2]
    assert at_a_time((2048, 8192), True) == at_a_time((8192, 2048), True) == 5
    assert at_a_time(512, False) == 1


def test_threads_read_the_same():
    slides = [slide(seed) for seed in range(6)]
    jobs = [(i, Box(k * 96, k * 96 + 96, 0, 384), e) for i in range(6) for k in range(4) for e in (None, 0)]
    alone = [dataset(slides).read(*job) for job in jobs]
    together = dataset(slides)
    with ThreadPoolExecutor(4) as pool:
        assert all(map(np.array_equal, alone, pool.map(lambda job: together.read(*job), jobs)))


def test_what_is_proposed_would_fit(tmp_path):
    slides = [slide(0), slide(1, 1500, 1500, ((0, 0, 180, 160),)), slide(2, pieces=())]
    images = dataset(slides)
    full, low, none = images.coverage_table()
    assert (full["coverage"], full["flags"], full["fits_size_px"], full["fits_mpp"]) == (1.0, "", None, None)
    assert (none["coverage"], none["flags"], none["fits_mpp"]) == (0.0, "no_tissue", None)
    assert low["coverage"] < 0.9 and low["flags"] == "cropped" and low["tissue_px"] == 1440 * 1280
    height, width = map(int, low["fits_size_px"].split("x"))
    assert dataset(slides, size_px=(height, width)).view(1).coverage == 1.0
    assert dataset(slides, size_px=(height - 384 // 8, width - 384 // 8)).view(1).coverage < 1.0
    assert images.coverage(1).fits_mpp > 1.0
    write_coverage(tmp_path / "coverage.csv", images.coverage_table())
    with (tmp_path / "coverage.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COVERAGE_COLUMNS
    assert [row["slide_id"] for row in rows] == ["s0", "s1", "s2"]
    assert rows[0]["fits_mpp"] == "" and float(rows[1]["coverage"]) == low["coverage"]


def test_low_coverage_is_refused_with_what_would_fit():
    images = dataset([slide(0), slide(1, 1500, 1500, ((0, 0, 180, 160),)), slide(2, pieces=())])
    with pytest.raises(RequestError) as caught:
        check_coverage(images, 0.9)
    message, fits = str(caught.value), images.coverage(1)
    assert "s0" not in message and "s1: 0." in message and "s2: 0.000 (no tissue" in message
    assert f"data.size_px=[{fits.fits_size_px[0]},{fits.fits_size_px[1]}]" in message
    assert f"data.mpp={fits.fits_mpp:g}" in message
    height, width = map(int, re.findall(r"size_px=\[(\d+),(\d+)\] shows enough of every slide", message)[0])
    assert images.coverage_at(1, (height, width)) >= 0.9 > images.coverage_at(1, (height - 32, width - 32))
    assert (height, width) <= fits.fits_size_px
    check_coverage(dataset([slide(0)]), 0.9)


@pytest.mark.parametrize(("listed", "more"), [(3, None), (2, "… and 1 more")])
def test_so_many_slides_are_named_and_the_others_counted(monkeypatch, listed, more):
    monkeypatch.setattr("data.samples.coverage.MAX_LISTED", listed)
    with pytest.raises(RequestError) as caught:
        check_coverage(dataset([slide(number, pieces=()) for number in range(3)]), 0.9)
    assert str(caught.value).count("(no tissue") == listed
    assert ("more" in str(caught.value)) == (more is not None) and (more or "") in str(caught.value)


@pytest.mark.parametrize("kind", ["pack", "crop"])
def test_a_proposed_mpp_holds_all_of_the_tissue(kind):
    tall = slide(1, 1600, 800, ((3, 2, 190, 60),))
    fits = dataset([tall], view=kind).coverage(0).fits_mpp

    @dataclass
    class Coarser(MemorySlide):
        @property
        def levels(self):
            height, width = self.pixels.shape[1:]
            return (StoreLevel(int(np.ceil(height / fits)), int(np.ceil(width / fits)), (fits, fits), "0"),)

    assert dataset([Coarser(tall.pixels, tall.mask)], mpp=fits, view=kind).view(0).coverage == 1.0


def test_images_may_be_higher_than_wide():
    images = dataset([slide(0)], size_px=(384, 256))
    assert images.size_px == images.view(0).size_px == (384, 256) and dataset([slide(0)]).size_px == (384, 384)


def test_slides_must_be_in_the_store_and_once(tmp_path):
    with pytest.raises(RequestError, match="has no slide gone; run"):
        SlideDataset(tmp_path, [SlideRef("gone")], size_px=64, mpp=1.0)
    with pytest.raises(RequestError, match="has no slide gone and 1 more; run"):
        SlideDataset(tmp_path, [SlideRef("gone"), SlideRef("lost")], size_px=64, mpp=1.0)
    with pytest.raises(RequestError, match="s0 is listed twice"):
        SlideDataset(tmp_path, [SlideRef("s0"), SlideRef("s0")], size_px=64, mpp=1.0)


def test_slides_are_chosen_by_status_label_and_split(tmp_path):
    (tmp_path / "labels.csv").write_text("slide_id,case_id,label\na,c1,x\nb,c1,\nc,c2,y\nd,c3,y\n")
    labels = load_labels(tmp_path / "labels.csv", "label")
    rows = [{"slide_id": s, "status": "failed" if s == "d" else "done"} for s in "abcde"]
    splits = {"a": "train", "b": "train", "c": "val", "d": "train"}
    assert select_slides(rows, labels, splits, "train") == (SlideRef("a", "c1", 0),)
    assert select_slides(rows, labels) == (SlideRef("a", "c1", 0), SlideRef("c", "c2", 1))
    with pytest.raises(RequestError, match=r"case c1 is in two splits: train .slide a. and test .slide b."):
        select_slides(rows, labels, splits | {"b": "test"}, "train")
    assert [ref.slide_id for ref in select_slides(rows)] == ["a", "b", "c", "e"]


def test_a_true_store_gives_the_same_pixels(tmp_path):
    source = slide(7)
    height, width = source.pixels.shape[1:]
    with SlideWriter(tmp_path, "s0", pyramid_levels([LevelSize(height, width)], 1.0)) as writer:
        writer.write(0, 0, 0, source.pixels)
        writer.write_tissue(source.mask, MASK_MPP)
        writer.publish({})
    stored = SlideDataset(tmp_path, [SlideRef("s0")], size_px=384, mpp=1.0, align_px=32, seed=5, augment=Augment())
    memory = dataset([source])
    assert stored.view(0) == memory.view(0)
    for epoch in (None, 0, 1):
        box = Box(17, 290, 100, 384)
        assert np.array_equal(stored.read(0, box, epoch), memory.read(0, box, epoch))
    stored.check_files()
    max((tmp_path / "s0.zarr").rglob("*"), key=lambda path: path.stat().st_size * path.is_file()).unlink()
    with pytest.raises(StoreError):
        SlideDataset(tmp_path, [SlideRef("s0")], size_px=384, mpp=1.0).check_files()


def test_slides_with_the_same_content_in_two_splits_are_refused():
    rows = [{"slide_id": name, "case_id": "", "status": "done", "source_sha256": "00ff"} for name in ("a", "b")]
    assert len(select_slides(rows, splits={"a": "train", "b": "train"}, split="train")) == 2
    with pytest.raises(RequestError, match="same content"):
        select_slides(rows, splits={"a": "train", "b": "val"}, split="train")
