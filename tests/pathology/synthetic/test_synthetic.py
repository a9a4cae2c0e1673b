"""Synthetic slides: real files, the same bytes from the same seed, and a class that only the pixels show."""

from __future__ import annotations

import csv
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile

from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from pathology.readers.sources import open_source
from pathology.synthetic import sprites
from pathology.synthetic.anatomy import SlideSpec, focus_boxes, tissue_truth
from pathology.synthetic.archive import lay_out_archive, make_archive, write_archive_slide
from pathology.synthetic.fields import Noise, enlarge
from pathology.synthetic.placing import make_anatomy
from pathology.synthetic.render import Renderer
from pathology.synthetic.tiff import write_slide

SPEC = SlideSpec(seed=3, index=0, case=0, size_px=1024, positive=True)


def draw(spec: SlideSpec) -> np.ndarray:
    return Renderer(make_anatomy(spec)).read(Box.of_size(spec.size_px, spec.size_px))


def shrunk(image: np.ndarray, factor: int) -> np.ndarray:
    n = image.shape[0] // factor
    return image[: n * factor, : n * factor].reshape(n, factor, n, factor, 3).mean((1, 3))


def test_openslide_reads_size_levels_and_mpp(tmp_path: Path) -> None:
    path = tmp_path / "s.tiff"
    write_slide(make_anatomy(replace(SPEC, size_px=1100)), path)
    source = open_source(path)
    assert [(level.height_px, level.width_px) for level in source.levels] == [(1100, 1100), (550, 550), (275, 275)]
    assert source.mpp == pytest.approx((0.5, 0.5), rel=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.tiff"]
    source.close()


@pytest.mark.parametrize(("size_px", "levels"), [(512, [512, 256]), (768, [768, 384]), (514, [514, 257])])
def test_every_level_is_whole(tmp_path: Path, size_px: int, levels: list[int]) -> None:
    """Sizes whose levels end inside, at, and just after a row of tiles."""
    write_slide(make_anatomy(replace(SPEC, size_px=size_px)), tmp_path / "s.tiff")
    with tifffile.TiffFile(tmp_path / "s.tiff") as file:
        assert [page.asarray().shape for page in file.pages] == [(n, n, 3) for n in levels]
        assert all(
            page.asarray()[-40:, x : x + 40].mean() > 60
            for page, n in zip(file.pages, levels, strict=True)
            for x in (0, n - 40)
        )


def test_file_holds_the_drawing_on_all_levels(tmp_path: Path) -> None:
    """Odd sizes, ragged last tiles; JPEG may move single pixels, not means."""
    spec = replace(SPEC, size_px=801)
    write_slide(make_anatomy(spec), tmp_path / "s.tiff")
    drawn = draw(spec).astype(np.float32)
    with tifffile.TiffFile(tmp_path / "s.tiff") as file:
        assert [page.shape for page in file.pages] == [(801, 801, 3), (400, 400, 3)]
        assert np.abs(file.pages[0].asarray() - drawn).mean() < 3
        assert np.abs(file.pages[1].asarray() - shrunk(drawn, 2)).mean() < 3


def test_same_seed_same_bytes_and_another_seed_other_bytes(tmp_path: Path) -> None:
    digests = []
    for run, seed in enumerate((5, 5, 6)):
        folder = tmp_path / str(run)
        make_archive(lay_out_archive(2, 512, seed), folder)
        digests.append([hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())])
    assert digests[0] == digests[1]
    assert not set(digests[0][1:]) & set(digests[2][1:])


def test_any_region_is_the_same_alone() -> None:
    renderer = Renderer(make_anatomy(replace(SPEC, blur=True, pen=True)))
    whole = renderer.read(Box(0, 1024, 0, 1024))
    for box in (Box(300, 700, 450, 1024), Box(511, 513, 0, 9), Box(100, 101, 511, 512)):
        np.testing.assert_array_equal(renderer.read(box), whole[box.slices()])


def test_no_drawing_is_cut_at_the_edge_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer(make_anatomy(SPEC))
    whole = renderer.read(Box(0, 512, 0, 512))
    monkeypatch.setattr("pathology.synthetic.render.BLOCK_PX", 128)
    blocks = renderer.read(Box(0, 512, 0, 512))
    assert np.abs(blocks.astype(int) - whole).max() <= 2  # smooth fields round a little; a cut nucleus differs by 50


def test_label_moves_nothing_but_the_drawings_of_the_foci() -> None:
    positive, negative = (make_anatomy(replace(SPEC, positive=label)) for label in (True, False))
    assert np.array_equal(positive.nuclei[:, :2], negative.nuclei[:, :2])
    assert np.array_equal(positive.nuclei[:, 3], negative.nuclei[:, 3])
    changed = positive.nuclei[:, 2] != negative.nuclei[:, 2]
    assert set(positive.nuclei[changed, 2]) == {sprites.COARSE}
    assert set(negative.nuclei[changed, 2]) == {sprites.DUSTY}
    plump = (negative.nuclei[:, 2] == sprites.DUSTY).sum()
    assert 5 <= changed.sum() < 0.5 * plump
    assert focus_boxes(negative) == []


def test_class_shows_in_the_foci_and_vanishes_in_a_thumbnail() -> None:
    specs = [replace(SPEC, positive=label) for label in (True, False)]
    positive, negative = (draw(spec).astype(np.float32) for spec in specs)
    difference = np.abs(positive - negative).max(axis=2)
    outside = np.ones(difference.shape, bool)
    boxes = focus_boxes(make_anatomy(specs[0]))
    assert 1 <= len(boxes) <= 10
    for box in boxes:
        inside = difference[max(0, box.y0 - 16) : box.y1 + 16, max(0, box.x0 - 16) : box.x1 + 16]
        assert inside.max() > 60
        outside[max(0, box.y0 - 16) : box.y1 + 16, max(0, box.x0 - 16) : box.x1 + 16] = False
    assert difference[outside].max() == 0
    tiny = np.abs(shrunk(positive, 32) - shrunk(negative, 32))
    assert tiny.max() < 12
    assert np.abs((positive - negative).mean((0, 1))).max() < 0.2


def test_look_alikes_have_the_outline_and_the_mean_colour_of_the_real_ones() -> None:
    drawn = sprites.library(0.5)
    passes = sprites.pigment_light(drawn.dust)
    clear = sprites.NUCLEOPLASM_E * sprites.E_SCALE * np.array(sprites.EOSIN)
    for index in range(sprites.VARIANTS[sprites.DUSTY]):
        nucleus = drawn.stamps[sprites.DUSTY][index]
        assert nucleus is drawn.stamps[sprites.COARSE][index]
        base = np.exp(-clear - nucleus[..., None] * (sprites.H_SCALE * np.array(sprites.HAEMATOXYLIN)))
        dusty, coarse = (base * passes[drawn.pigment[kind][index]] for kind in (sprites.DUSTY, sprites.COARSE))
        np.testing.assert_allclose(dusty.mean((0, 1)), coarse.mean((0, 1)), atol=0.015)
        inside = drawn.cover[index] > 250
        assert coarse[inside].std() > 2 * dusty[inside].std()  # what the network has to see


def test_tissue_truth_is_where_it_is_pink() -> None:
    anatomy = make_anatomy(replace(SPEC, size_px=2048))
    truth = tissue_truth(anatomy, 8.0)
    assert truth.shape == (128, 128)
    assert 0.2 < truth.mean() < 0.9
    picture = shrunk(Renderer(anatomy).read(Box.of_size(2048, 2048)), 16)
    pink = picture[..., 1] < 225
    dice = 2 * (truth & pink).sum() / (truth.sum() + pink.sum())
    assert dice > 0.93


def test_looks_like_haematoxylin_and_eosin() -> None:
    """Off-white glass, pink stroma, purple nuclei, in these shares."""
    image = draw(replace(SPEC, size_px=2048)).reshape(-1, 3).astype(int)
    red, green, blue = image.T
    glass = image.min(axis=1) > 230
    purple = (green < 110) & (blue > green + 15)
    pink = ~glass & (red > green + 25) & (red > 150)
    assert 0.1 < glass.mean() < 0.8
    assert 0.01 < purple.mean() < 0.3
    assert 0.1 < pink.mean() < 0.8
    assert image[glass].mean() < 250


def test_stain_differs_between_cases_more_than_within() -> None:
    def tissue_mean(index: int, case: int) -> np.ndarray:
        pixels = draw(SlideSpec(9, index, case, 512, False)).reshape(-1, 3).astype(float)
        return pixels[pixels[:, 1] < 215].mean(0)

    between = np.std([tissue_mean(0, case) for case in range(6)], axis=0).mean()
    assert between > 1.5


def test_pen_and_blur_only_on_request() -> None:
    plain, pen, blur = draw(SPEC), draw(replace(SPEC, pen=True)), draw(replace(SPEC, blur=True))
    inked = np.abs(plain.astype(int) - pen).max(2) > 40
    assert 0.003 < inked.mean() < 0.2
    changed = np.abs(plain.astype(int) - blur).max(2) > 0
    assert 0.02 < changed.mean() < 0.5

    def sharpness(image: np.ndarray) -> float:
        return float(np.abs(np.diff(image[..., 1].astype(float), axis=0))[changed[1:]].mean())

    assert sharpness(blur) < 0.5 * sharpness(plain)


def test_archive_balances_labels_and_keeps_cases_whole() -> None:
    planned = lay_out_archive(110, 2048, seed=7)
    assert len(planned) == 110
    cases: dict[int, list[int]] = {}
    for number, slide in enumerate(planned):
        cases.setdefault(slide.spec.case, []).append(number)
    assert {len(members) for members in cases.values()} == {1, 2, 3}
    for members in cases.values():
        assert len({(planned[m].spec.positive, planned[m].split) for m in members}) == 1
    assert abs(sum(slide.spec.positive for slide in planned) - 55) <= 3
    test = [slide.spec.positive for slide in planned if slide.split == "test"]
    assert len(test) >= 40
    assert 0.4 < np.mean(test) < 0.6
    assert {slide.split for slide in planned} == {"train", "val", "test"}


def test_manifest_and_truth(tmp_path: Path) -> None:
    planned = lay_out_archive(3, 512, seed=1)
    seen: list[str] = []
    manifest = make_archive(planned, tmp_path, truth=True, finished=lambda path: seen.append(path.name))
    rows = list(csv.DictReader(manifest.open()))
    assert [row["path"] for row in rows] == seen
    assert all((tmp_path / row["path"]).is_file() for row in rows)
    assert {row["label"] for row in rows} == {"benign", "malignant"}
    for row in rows:
        truth = json.loads((tmp_path / "truth" / f"{row['slide_id']}.json").read_text())
        assert bool(truth["foci"]) == (row["label"] == "malignant")


def test_two_workers_draw_the_same_archive(tmp_path: Path) -> None:
    planned = lay_out_archive(2, 512, seed=1)
    make_archive(planned, tmp_path / "one")
    make_archive(planned, tmp_path / "two", workers=2)
    names = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "two").iterdir())
    assert all((tmp_path / "one" / n).read_bytes() == (tmp_path / "two" / n).read_bytes() for n in names)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Renderer, box: Box) -> np.ndarray:
        raise OSError("disk full")

    monkeypatch.setattr(Renderer, "read", broken)
    with pytest.raises(OSError, match="disk full"):
        write_archive_slide(lay_out_archive(1, 512)[0], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((0, 2048, 0), ["--slides", "0"]), ((3, 100, 0), ["--size", "100", "512"]), ((3, 2048, -1), ["--seed", "-1"])],
)
def test_wrong_requests_are_named(arguments: tuple[int, int, int], words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        lay_out_archive(*arguments)
    assert all(word in str(caught.value) for word in words)


def test_noise_is_one_function_of_position() -> None:
    noise = Noise.make(np.random.default_rng(0), 40.0)
    ys, xs = np.linspace(-100, 900, 57), np.linspace(3, 4000, 91)
    grid = noise.grid(ys, xs)
    points = noise.at(*np.meshgrid(ys, xs, indexing="ij"))
    np.testing.assert_allclose(grid, points, atol=1e-5)
    assert grid.std() == pytest.approx(1, abs=0.25)


def test_enlarge_is_linear_between_nodes() -> None:
    nodes = np.arange(12, dtype=np.float32).reshape(3, 4) ** 2
    large = enlarge(nodes, 4)
    assert large.shape == (8, 12)
    np.testing.assert_array_equal(large[::4, ::4], nodes[:-1, :-1])
    assert large[2, 0] == pytest.approx((nodes[0, 0] + nodes[1, 0]) / 2)
    assert large[0, 6] == pytest.approx((nodes[0, 1] + nodes[0, 2]) / 2)
