from __future__ import annotations

import copy
import csv
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch

from data.errors import StoreError
from data.samples.colours.stain_normalisation import StainNormalisation
from data.samples.dataset import SlideDataset, SlideRef
from data.samples.trained.trained_slides import TrainedSlides
from data.samples.view import View
from data.store.layout import LevelSize, pyramid_levels
from data.store.writer import SlideWriter
from hyfi_core.arithmetic import set_arithmetic
from hyfi_core.cells import pager, paging
from hyfi_core.cells.spill_store import SpillFile
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError
from hyfi_core.models.resnet import resnet10
from hyfi_core.plan.box import Box
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from pathology.predict import results
from pathology.predict.cohort import predict_slides
from pathology.predict.inputs import find_inputs
from pathology.predict.members import Member
from pathology.predict.options import PredictOptions
from pathology.predict.readout import ClassReadout
from pathology.predict.table import PredictionReport
from tests.pathology.slides import FOCUS, Darkness, draw_slide, member_of, write_slide
from tests.pathology.tissue.drawn_slides import draw

FILES = {
    "heatmap.tiff",
    "scores.tiff",
    "thumbnail.jpg",
    "overlay.png",
    "regions.geojson",
    "report.html",
    "prediction.json",
}


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_slide(tmp_path_factory.mktemp("slides") / "one.tiff", draw_slide())


@pytest.fixture(scope="module")
def store(slide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    row = {"case_id": "C-1", "source_path": str(slide)}
    assert ingest_slide(slide, folder, IngestOptions(mpp=1.0), row).status == "done"
    return folder


def predict(
    out: Path, paths: list[Path], *members: Member, comm: Communicator | None = None, **options: object
) -> PredictionReport:
    chosen = members or (member_of(Darkness()),)
    return predict_slides(
        chosen,
        find_inputs(paths),
        out,
        comm or AloneCommunicator(),
        PredictOptions(**options),  # type: ignore[arg-type]
    )


def table(out: Path) -> list[dict[str, str]]:
    with (out / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def image_of(store: Path, size_px: tuple[int, int]) -> tuple[SlideDataset, torch.Tensor]:
    dataset = SlideDataset(store, [SlideRef("one")], size_px=size_px, mpp=1.0)
    pixels = dataset.read(0, dataset.view(0).box)
    return dataset, torch.from_numpy(pixels)[None].float() / 255 - 0.9


def test_a_file_gives_the_models_answer_and_all_files(slide: Path, store: Path, tmp_path: Path) -> None:
    model = Darkness()
    report = predict(tmp_path / "out", [slide], member_of(model))
    assert [one.status for one in report.done] == ["done"]
    (row,) = table(tmp_path / "out")
    assert list(row) == (
        ["slide_id", "case_id", "path", "prediction", "p_pale", "p_dark", "coverage", "flags", "status", "reason"]
    )
    dataset, image = image_of(store, (512, 576))
    assert len(dataset.view(0).pieces) > 1
    logits = model(image)[0].detach().double()
    expected = torch.softmax(logits, 0)
    assert float(row["p_dark"]) == pytest.approx(float(expected[1]), abs=2e-6)
    assert row["prediction"] == ["pale", "dark"][int(expected.argmax())]
    assert (row["slide_id"], row["path"], row["status"], row["reason"]) == ("one", str(slide), "done", "")
    assert float(row["coverage"]) == pytest.approx(dataset.view(0).coverage, abs=1e-4)
    assert {path.name for path in (tmp_path / "out" / "one").iterdir()} == FILES
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"one", "predictions.csv", "predictions.json"}
    values = tifffile.imread(tmp_path / "out" / "one" / "heatmap.tiff")
    total = np.nansum(values[2:].astype(np.float64), axis=(1, 2)) + model.fc.bias.detach().numpy()
    np.testing.assert_allclose(total, logits.numpy(), atol=1e-5)
    finite = np.isfinite(values)  # cells of 64 pixels of the file; tissue from row 100 and column 60 on
    assert finite[:, 4, 3].all() and finite[:, 8, 25].all()
    seen_glass = finite[2] & ~finite[0]
    assert seen_glass.any() and not finite[0, :, 10:20].any()


def test_slides_of_the_training_set_are_flagged_by_their_file_under_any_name(
    slide: Path, store: Path, tmp_path: Path
) -> None:
    trained = TrainedSlides.of(SlideDataset(store, [SlideRef("one", "C-1")], size_px=(512, 576), mpp=1.0)).to_json()
    other = write_slide(tmp_path / "other.tiff", draw_slide(seed=1))
    renamed = tmp_path / "renamed.tiff"
    renamed.write_bytes(slide.read_bytes())
    named_alike = tmp_path / "elsewhere" / "one.tiff"
    named_alike.parent.mkdir()
    named_alike.write_bytes(other.read_bytes())
    member = member_of(Darkness(), trained_on=trained)
    flagged = (
        predict(tmp_path / "out", [renamed, other], member).done + predict(tmp_path / "b", [named_alike], member).done
    )
    assert [(one.slide_id, "trained_on" in one.flags) for one in flagged] == [
        ("renamed", True),
        ("other", False),
        ("one", False),
    ]
    (row,) = (row for row in table(tmp_path / "out") if row["slide_id"] == "renamed")
    assert "trained_on" in row["flags"].split(";")
    assert "was trained on this slide" in (tmp_path / "out" / "renamed" / "report.html").read_text()


def test_slides_far_larger_than_those_of_training_are_flagged_with_the_reason(
    slide: Path, store: Path, tmp_path: Path
) -> None:
    trained = TrainedSlides.of(SlideDataset(store, [SlideRef("one", "C-1")], size_px=(512, 576), mpp=1.0)).to_json()
    (least, most), expected = trained["ranges"]["area_mm2"], "18 times the area of the largest training slide"
    for factor, flagged in ((1, False), (18, True)):
        trained["ranges"]["area_mm2"] = [least / factor, most / factor]
        out = tmp_path / str(factor)
        (prediction,) = predict(out, [slide], member_of(Darkness(), trained_on=trained)).done
        (row,) = table(out)
        assert ("outside_training" in prediction.flags) == ("outside_training" in row["flags"].split(";")) == flagged
        assert row["reason"] == (f"outside_training: {expected}" if flagged else "")
        assert (expected in (out / slide.stem / "report.html").read_text()) == flagged


def test_heatmap_and_regions_are_in_register_with_the_slide(slide: Path, tmp_path: Path) -> None:
    model = Darkness()
    with torch.no_grad():
        model.fc.bias.copy_(torch.tensor([-9.0, 9.0]))
    predict(tmp_path, [slide], member_of(model))
    values = tifffile.imread(tmp_path / "one" / "heatmap.tiff")
    assert values.shape == (4, -(-500 // 32), -(-1000 // 32))
    y, x = np.unravel_index(np.nanargmax(values[3]), values.shape[1:])
    cell = 32 * 2  # level-0 pixels
    assert FOCUS[0] - cell < y * cell < FOCUS[1]
    assert FOCUS[2] - cell < x * cell < FOCUS[3]
    regions = json.loads((tmp_path / "one" / "regions.geojson").read_text())["features"]
    corners = np.array([point for f in regions for ring in f["geometry"]["coordinates"] for point in ring])
    assert (corners >= 0).all()
    assert (corners <= [2000, 1000]).all()
    assert any(
        min(p[0] for p in f["geometry"]["coordinates"][0]) < FOCUS[3]
        and max(p[0] for p in f["geometry"]["coordinates"][0]) > FOCUS[2]
        and min(p[1] for p in f["geometry"]["coordinates"][0]) < FOCUS[1]
        and max(p[1] for p in f["geometry"]["coordinates"][0]) > FOCUS[0]
        for f in regions
    )


def test_file_store_and_slide_of_a_store_give_the_same_numbers(slide: Path, store: Path, tmp_path: Path) -> None:
    rows = []
    for name, path in (("a", slide), ("b", store), ("c", store / "one.zarr")):
        predict(tmp_path / name, [path])
        rows += table(tmp_path / name)
    assert rows[0]["p_dark"] == rows[1]["p_dark"] == rows[2]["p_dark"]
    assert [row["case_id"] for row in rows] == ["", "C-1", "C-1"]
    first, second = (tifffile.imread(tmp_path / name / "one" / "heatmap.tiff") for name in "ab")
    np.testing.assert_array_equal(first, second)


def test_two_ranks_say_what_one_says(slide: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = resnet10(2, width=8).eval()
    member = member_of(model, size_px=[320, 330])
    alone = predict(tmp_path / "1", [slide], member)
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(comm: Communicator) -> PredictionReport:
        mine = member_of(models[comm.rank], size_px=[320, 330])
        return predict(tmp_path / "2", [slide], mine, comm=comm)

    first, second = run_ranks(2, body)
    assert first == second
    np.testing.assert_allclose(first.done[0].values, alone.done[0].values, atol=1e-6)
    ours, theirs = (tifffile.imread(tmp_path / n / "one" / "heatmap.tiff") for n in "12")
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.nanmax(np.abs(ours)))
    assert {path.name for path in (tmp_path / "2").iterdir()} == {"one", "predictions.csv", "predictions.json"}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_cells_say_what_one_piece_says(slide: Path, tmp_path: Path, ranks: int) -> None:
    torch.manual_seed(3)
    model = resnet10(2, width=8).eval()
    whole = predict(tmp_path / "1", [slide], member_of(model, size_px=[320, 330]))
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def body(comm: Communicator) -> PredictionReport:
        return predict(
            tmp_path / "2", [slide], member_of(models[comm.rank], size_px=[320, 330]), comm=comm, cells=(3, 2)
        )

    cells = run_ranks(ranks, body)
    assert all(one == cells[0] for one in cells)
    np.testing.assert_allclose(cells[0].done[0].values, whole.done[0].values, atol=1e-6)
    ours, theirs = (tifffile.imread(tmp_path / n / "one" / "heatmap.tiff") for n in "12")
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.nanmax(np.abs(ours)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_predictions_that_spill_say_what_one_piece_says(
    slide: Path, tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pager, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(paging, "page_limit", lambda *given: 100_000)
    written: list[int] = []
    write = SpillFile.write
    monkeypatch.setattr(
        SpillFile, "write", lambda store, of, place: (written.append(of.nbytes()), write(store, of, place))[1]
    )
    torch.manual_seed(3)
    model = resnet10(2, width=8).eval()
    whole = predict(tmp_path / "1", [slide], member_of(model, size_px=[320, 330]))
    models = [copy.deepcopy(model) for _ in range(ranks)]
    limits = {"cells": (3, 2), "spill": str(tmp_path / "spilled")}

    def body(comm: Communicator) -> PredictionReport:
        return predict(tmp_path / "2", [slide], member_of(models[comm.rank], size_px=[320, 330]), comm=comm, **limits)

    found = run_ranks(ranks, body)
    assert sum(written) > 100_000 and list((tmp_path / "spilled").iterdir()) == []
    np.testing.assert_allclose(found[0].done[0].values, whole.done[0].values, atol=1e-6)
    ours, theirs = (tifffile.imread(tmp_path / n / "one" / "heatmap.tiff") for n in "12")
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.nanmax(np.abs(ours)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_slide_that_cannot_be_read_in_cells_leaves_nothing_to_the_next(
    slide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.tiff").write_bytes(slide.read_bytes())
    inputs = [tmp_path / f"{name}.tiff" for name in ("a", "b", "c")]
    torch.manual_seed(3)
    model = resnet10(2, width=8).eval()
    (wanted, *_) = predict(tmp_path / "1", [slide], member_of(model, size_px=[320, 330])).done
    models = [copy.deepcopy(model) for _ in range(ranks)]
    read, boxes = SlideDataset.read_view, []

    def damaged(self: SlideDataset, index: int, view: View, box: Box) -> np.ndarray:
        if self.samples[index].slide_id == "b":
            boxes.append(box)
            if len(boxes) == 3:
                raise StoreError("shard c/0/0/0 is damaged")
        return read(self, index, view, box)

    def body(comm: Communicator) -> PredictionReport:
        return predict(
            tmp_path / "2", inputs, member_of(models[comm.rank], size_px=[320, 330]), comm=comm, cells=(2, 2)
        )

    monkeypatch.setattr(SlideDataset, "read_view", damaged)
    report = run_ranks(ranks, body)[0]
    assert [one.slide_id for one in report.done] == ["a", "c"] and len(boxes) >= 3
    assert report.failed[0].reason == "shard c/0/0/0 is damaged"
    for one in report.done:
        np.testing.assert_allclose(one.values, wanted.values, atol=1e-6)


def test_what_cannot_be_predicted_fails_alone(slide: Path, tmp_path: Path) -> None:
    folder = tmp_path / "slides"
    folder.mkdir()
    (folder / "empty.svs").touch()
    write_slide(folder / "glass.tiff", draw_slide(tissue=False))
    write_slide(folder / "nompp.tiff", draw_slide(), mpp=None)
    out = tmp_path / "out"
    report = predict(out, [folder, slide])
    rows = {row["slide_id"]: row for row in table(out)}
    assert {name: row["status"] for name, row in rows.items()} == {
        "empty": "failed",
        "glass": "failed",
        "nompp": "failed",
        "one": "done",
    }
    assert [one.slide_id for one in report.failed] == ["empty", "glass", "nompp"]
    assert rows["glass"]["prediction"] == rows["glass"]["p_dark"] == ""
    assert rows["glass"]["flags"].split(";") == ["no_tissue"]
    assert "0 bytes" in rows["empty"]["reason"]
    assert "--slide-mpp" in rows["nompp"]["reason"]
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["one"]
    again = predict(out, [folder, slide], slide_mpp=0.5)
    assert [one.flags for one in again.done if one.slide_id == "nompp"] == [("mpp_assumed",)]


def test_a_plausible_mpp_of_the_file_is_replaced_only_by_force(slide: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.csv"
    sheet.write_text(f"path,source_mpp\n{slide},0.6\n")
    (refused,) = predict(tmp_path / "out", [sheet]).failed
    assert "--force-mpp" in refused.reason
    (forced,) = predict(tmp_path / "out", [sheet], force_mpp=True).done
    assert forced.source_mpp == 0.6 and "mpp_replaced" in forced.flags
    (kept,) = predict(tmp_path / "out", [slide], slide_mpp=0.25).done  # the file's, and the command says so
    assert kept.source_mpp == 0.5


def test_an_mpp_out_of_range_is_refused_before_anything_is_written(slide: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--mpp 100"):
        predict(tmp_path / "out", [slide], mpp=100.0)
    assert not (tmp_path / "out").exists()


def test_finished_slides_are_skipped_and_other_checkpoints_refused(slide: Path, tmp_path: Path) -> None:
    member, other = member_of(Darkness()), member_of(Darkness(), "two")
    predict(tmp_path, [slide], member)
    report = (tmp_path / "one" / "report.html").stat().st_mtime_ns
    assert predict(tmp_path, [slide], member).skipped == ("one",)
    begun: list[int] = []
    predict_slides([member], find_inputs([slide]), tmp_path, AloneCommunicator(), begin=begun.append)
    assert begun == [1]
    assert (tmp_path / "one" / "report.html").stat().st_mtime_ns == report
    with pytest.raises(RequestError, match="--overwrite"):
        predict(tmp_path, [slide], other)
    assert len(predict(tmp_path, [slide], member, overwrite=True).done) == 1
    assert len(predict(tmp_path, [slide], other, overwrite=True).done) == 1
    assert len(table(tmp_path)) == 1


def test_results_of_another_slide_of_the_same_name_are_kept(slide: Path, store: Path, tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text(f"path,slide_id\n{slide},{slide.stem}\n")
    assert len(predict(tmp_path, [tmp_path / "m.csv"]).done) == 1
    copied = Path(shutil.copy(slide, tmp_path / "copy.tiff"))  # another time, the same size
    (tmp_path / "m.csv").write_text(f"path,slide_id\n{copied},{slide.stem}\n")
    assert len(predict(tmp_path, [tmp_path / "m.csv"]).done) == 1
    with copied.open("ab") as file:
        file.write(b"0")
    other = copied.rename(tmp_path / "other.tiff")
    (tmp_path / "m.csv").write_text(f"path,slide_id\n{other},{slide.stem}\n")
    before = (tmp_path / "predictions.csv").read_bytes()
    with pytest.raises(RequestError, match=r"has the results of .*copy.tiff, and .*other.tiff is another slide"):
        predict(tmp_path, [tmp_path / "m.csv"])
    assert (tmp_path / "predictions.csv").read_bytes() == before
    assert len(predict(tmp_path, [store]).done) == 1  # of a store: it cannot be compared
    again = Path(shutil.copytree(store, tmp_path / "again"))
    for path in again.rglob("zarr.json"):
        os.utime(path, (1, 1))
    with pytest.raises(RequestError, match="another slide"):
        predict(tmp_path, [again])
    assert len(predict(tmp_path, [again], overwrite=True).done) == 1


def test_folders_of_others_are_left_alone(slide: Path, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "mine.txt").write_text("keep")
    with pytest.raises(RequestError, match="not written by hyfi predict"):
        predict(tmp_path, [slide], overwrite=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["one", "mine.txt"]


def test_ensemble_gives_mean_and_spread(slide: Path, tmp_path: Path) -> None:
    members = [member_of(Darkness(seed=1), "a"), member_of(Darkness(16, seed=2), "b")]
    both = predict(tmp_path / "ab", [slide], *members).done[0]
    single = [predict(tmp_path / m.digest, [slide], m).done[0].values for m in members]
    np.testing.assert_allclose(both.values, np.mean(single, axis=0), atol=1e-9)
    predicted = ["pale", "dark"].index(both.prediction)
    assert both.spread == pytest.approx(np.std([p[predicted] for p in single]), abs=1e-9)
    (row,) = table(tmp_path / "ab")
    assert float(row["spread"]) == pytest.approx(both.spread, abs=1e-6)
    assert "±" in (tmp_path / "ab" / "one" / "report.html").read_text()


def test_members_that_differ_cannot_predict_together(slide: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"size_px is .*512.* and .*256"):
        predict(tmp_path / "out", [slide], member_of(Darkness()), member_of(Darkness(), "b", size_px=[256, 256]))
    others = replace(member_of(Darkness(), "b"), own_readout=ClassReadout(("pale", "grey")))
    with pytest.raises(RequestError, match=r"a predicts p_pale, p_dark, and .*b predicts p_pale, p_grey"):
        predict(tmp_path / "out", [slide], member_of(Darkness(), "a"), others)  # such as survival at other times
    assert not (tmp_path / "out").exists()


def test_failing_to_write_fails_the_slide_and_leaves_nothing(
    slide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict(tmp_path, [slide])
    before = (tmp_path / "one" / "report.html").read_bytes()

    def full(*arguments: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results, "render_report", full)
    report = predict(tmp_path, [slide], overwrite=True)
    assert "No space left" in report.failed[0].reason
    assert (tmp_path / "one" / "report.html").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"one", "predictions.csv", "predictions.json"}


def test_stops_between_slides_when_asked(slide: Path, store: Path, tmp_path: Path) -> None:
    second = write_slide(tmp_path / "two.tiff", draw_slide(seed=2))
    answers = iter([False, True])
    report = predict_slides(
        [member_of(Darkness())],
        find_inputs([slide, second]),
        tmp_path / "out",
        AloneCommunicator(),
        stop_wanted=lambda: next(answers),
    )
    assert report.stopped
    assert [row["slide_id"] for row in table(tmp_path / "out")] == ["one"]
    assert [one.slide_id for one in predict(tmp_path / "out", [slide, second]).done] == ["two"]


def test_a_damaged_store_fails_the_slide(store: Path, slide: Path, tmp_path: Path) -> None:
    ingest_slide(slide, tmp_path / "store", IngestOptions(mpp=1.0))
    shard = next(path for path in (tmp_path / "store" / "one.zarr" / "0" / "c").rglob("*") if path.is_file())
    shard.write_bytes(shard.read_bytes()[:-40])
    report = predict(tmp_path / "out", [tmp_path / "store"])
    assert "bytes" in report.failed[0].reason
    assert report.failed[0].path.endswith("one.zarr")


def test_a_stored_slide_without_its_place_on_a_file_fails_by_what_it_lacks(tmp_path: Path) -> None:
    with SlideWriter(tmp_path, "bare", pyramid_levels([LevelSize(64, 64)], 1.0)) as writer:
        writer.write(0, 0, 0, np.full((3, 64, 64), 99, np.uint8))
        writer.write_tissue(np.ones((8, 8), bool), mpp_um=8.0)
        writer.publish({"mpp": 1.0, "kind": "resampled"})
    report = predict(tmp_path / "out", [tmp_path / "bare.zarr"])
    assert "it has no affine, source, sha256 among" in report.failed[0].reason


def test_another_resolution_is_flagged(slide: Path, tmp_path: Path) -> None:
    (one,) = predict(tmp_path, [slide], mpp=2.0).done
    assert one.flags == ("mpp_changed",)


@pytest.mark.parametrize("tf32", [True, False])
def test_gpus_compute_as_in_training(slide: Path, tmp_path: Path, tf32: bool) -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    set_arithmetic(tf32=not tf32)
    try:
        predict(tmp_path, [slide], member_of(Darkness(), **({"tf32": True} if tf32 else {})))
        assert torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_inputs_that_do_not_go_together(slide: Path, store: Path, tmp_path: Path) -> None:
    copied = write_slide(tmp_path / "one.tiff", draw_slide(seed=9))
    assert len({one.slide_id for one in find_inputs([slide, copied])}) == 2
    assert len(find_inputs([slide, slide])) == 1
    with pytest.raises(RequestError, match="two slides are named one"):
        find_inputs([store, slide])
    with pytest.raises(RequestError, match="no such file"):
        find_inputs([tmp_path / "nowhere.svs"])
    (tmp_path / "hollow").mkdir()
    with pytest.raises(RequestError, match="no slide in this folder"):
        find_inputs([tmp_path / "hollow"])


def test_a_manifest_names_slides_and_cases(slide: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.csv"
    manifest.write_text(f"slide_id,path,case_id\nS7,{slide},C7\n")
    (one,) = find_inputs([manifest])
    assert (one.slide_id, one.case_id, one.path) == ("S7", "C7", slide)


@pytest.mark.slides
def test_real_slides(real_slides: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = resnet10(2, width=8)
    member = member_of(model, mpp=2.0, size_px=[768, 576])
    paths = [real_slides / name for name in ("CMU-1-Small-Region.svs", "odd/truncated.svs", "odd/no_mpp.svs")]
    report = predict(tmp_path, paths, member)
    assert [one.slide_id for one in report.done] == ["CMU-1-Small-Region"]
    assert [one.slide_id for one in report.failed] == ["truncated", "no_mpp"]
    with tifffile.TiffFile(tmp_path / "CMU-1-Small-Region" / "heatmap.tiff") as file:
        values = file.series[0].asarray()
        facts = file.ome_metadata or ""
    assert values.shape == (4, -(-742 // 32), -(-555 // 32))
    assert 'PhysicalSizeX="64.0"' in facts
    total = np.nansum(values[2:].astype(np.float64), axis=(1, 2)) + model.fc.bias.detach().numpy()
    p = report.done[0].values
    assert total[1] - total[0] == pytest.approx(np.log(p[1] / p[0]), abs=1e-4)


def test_prediction_normalises_stains_as_the_checkpoint_says(slide: Path, tmp_path: Path) -> None:
    pink = write_slide(tmp_path / "pink.tiff", draw("he", 640).image.transpose(1, 2, 0), 1.0)
    (tmp_path / "store").mkdir()
    stain = StainNormalisation.of("macenko")
    assert stain is not None
    model = Darkness(seed=1)
    predict(tmp_path / "out", [pink, slide], member_of(model, stain_normalisation=stain.to_json()))
    rows = {row["slide_id"]: row for row in table(tmp_path / "out")}
    assert "stain_as_scanned" in rows["one"]["flags"] and "stain_as_scanned" not in rows["pink"]["flags"]
    assert ingest_slide(pink, tmp_path / "store", IngestOptions(mpp=1.0), {"source_path": str(pink)}).status == "done"
    numbers = []
    for normalisation in (stain, None):
        options = {"size_px": (512, 576), "mpp": 1.0, "stain": normalisation}
        dataset = SlideDataset(tmp_path / "store", [SlideRef("pink")], **options)  # type: ignore[arg-type]
        views = dataset.whole_views(0, several=False)
        pixels = torch.from_numpy(dataset.read_view(0, views[0], views[0].box))[None].float() / 255 - 0.9
        numbers.append(float(torch.softmax(model(pixels)[0].detach().double(), 0)[1]))
    assert float(rows["pink"]["p_dark"]) == pytest.approx(numbers[0], abs=1e-5)
    assert abs(numbers[0] - numbers[1]) > 1e-3
    other = member_of(Darkness(), "two")
    with pytest.raises(RequestError, match=r"cannot form an ensemble: stain is macenko to .* and None in RUN/"):
        predict(tmp_path / "both", [slide], member_of(model, stain_normalisation=stain.to_json()), other)
