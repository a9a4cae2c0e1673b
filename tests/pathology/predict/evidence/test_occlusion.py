"""Occlusion equals the direct computation: the plain module on the whole image, one block of the slide white."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from data.samples.dataset import SlideDataset, SlideRef
from data.samples.view import View, make_view
from data.store.tissue_grid import TissueGrid
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from pathology.predict.cohort import predict_slides
from pathology.predict.ensemble import image_weights
from pathology.predict.evidence.blocks import OcclusionBlocks
from pathology.predict.evidence.occlude import check_evidence
from pathology.predict.inputs import find_inputs
from pathology.predict.members import InputSpec, Member
from pathology.predict.options import PredictOptions
from pathology.predict.table import PredictionReport
from tests.pathology.slides import FOCUS, Darkness, draw_slide, member_of, write_slide


class Patches(nn.Module):
    """Views the image as patches and pools them by attention, so that there is no map and no single block adds up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.score, self.head = nn.Linear(3 * 64 * 64, 8), nn.Linear(8, 1), nn.Linear(8, 2)
        with torch.no_grad():
            self.embed.weight *= 20  # so that single blocks matter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        x = x.view(b, c, h // 64, 64, w // 64, 64).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * 64 * 64)
        x = self.embed(x).tanh()
        return self.head((self.score(x).softmax(1) * x).sum(1))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    slide = write_slide(tmp_path_factory.mktemp("slides") / "one.tiff", draw_slide())
    folder = tmp_path_factory.mktemp("store")
    assert ingest_slide(slide, folder, IngestOptions(mpp=1.0), {"source_path": str(slide)}).status == "done"
    return folder


def predict(out: Path, store: Path, *members: Member, comm: Communicator | None = None, **options: object) -> list[str]:
    notes: list[str] = []
    asked = PredictOptions(**{"evidence": "occlusion", **options})  # type: ignore[arg-type]
    report = predict_slides(members, find_inputs([store]), out, comm or AloneCommunicator(), asked, say=notes.append)
    assert len(report.done) + len(report.skipped) == 1, report
    return notes


def direct(
    store: Path, model: nn.Module, size_px: tuple[int, int], whole: bool, drops: np.ndarray, block_px: int
) -> np.ndarray:
    """The drops of the same blocks of the slide's grid by the plain module."""
    dataset = SlideDataset(store, [SlideRef("one")], size_px=size_px, mpp=1.0)
    views = dataset.whole_views(0, several=True) if whole else (dataset.view(0),)
    images = [dataset.read_view(0, view, view.box) for view in views]

    def output(pixels: list[np.ndarray]) -> np.ndarray:
        with torch.no_grad():
            logits = np.stack(
                [model(torch.from_numpy(one)[None].float() / 255 - 0.9)[0].double().numpy() for one in pixels]
            )
        return (image_weights(logits, views, "mean") * logits).sum(0)

    slide = dataset.slide(0).levels[dataset.level(0)]
    assert drops.shape == (2, -(-slide.height_px // block_px), -(-slide.width_px // block_px))
    expected, whole_output = np.full(drops.shape, np.nan), output(images)
    for row, column in np.argwhere(np.isfinite(drops[0])).tolist():
        covered = [one.copy() for one in images]
        for one, view in zip(covered, views, strict=True):
            for piece in view.pieces:
                y, x = np.mgrid[piece.source.y0 : piece.source.y1, piece.source.x0 : piece.source.x1]
                rows, columns = piece.target.slices()
                one[:, rows, columns][:, (y // block_px == row) & (x // block_px == column)] = 255
        expected[:, row, column] = whole_output - output(covered)
    return expected


def read(out: Path) -> tuple[np.ndarray, dict[str, int]]:
    with tifffile.TiffFile(out / "one" / "occlusion.tiff") as file:
        entries = tifffile.xml2dict(file.ome_metadata)["OME"]["StructuredAnnotations"]["MapAnnotation"]["Value"]["M"]
        facts = {entry["K"]: entry.get("value", "") for entry in entries}
        return file.series[0].asarray(), {name: int(facts[name]) for name in ("block_px", "forwards")}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (2, {"evidence_blocks": 20}), (2, {"cells": (1, 2), "evidence_blocks": 9})],
)
@pytest.mark.parametrize("network", [Patches, Darkness])
def test_drops_are_those_of_the_plain_module(
    store: Path, tmp_path: Path, network: type[nn.Module], ranks: int, options: dict[str, object]
) -> None:
    """One block of the slide after the other is white in the image of the unmodified network."""
    most = int(str(options.get("evidence_blocks", 256)))
    members = [member_of(network()) for _ in range(ranks)]  # here, as threads would share the generator

    def body(comm: Communicator) -> list[str]:
        return predict(tmp_path / "out", store, members[comm.rank], comm=comm, **options)

    notes = run_ranks(ranks, body)
    drops, facts = read(tmp_path / "out")
    expected = direct(store, network(), (512, 576), False, drops, facts["block_px"])
    assert 1 < np.isfinite(drops[0]).sum() == facts["forwards"] <= most
    assert np.nanmax(np.abs(expected)) > 0.01
    np.testing.assert_allclose(drops, expected, atol=3e-6)
    (note,) = notes[0]
    assert note.startswith("one: occlusion covers blocks of ") and f"{facts['forwards']} forwards, about" in note
    assert notes[1:] == [[]] * (ranks - 1)


def test_several_images_have_one_output(store: Path, tmp_path: Path) -> None:
    """The network takes images of one size only; a block that two of them show is covered in both."""

    class Fixed(Patches):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.place)

        def __init__(self) -> None:
            super().__init__()
            self.place = nn.Parameter(torch.randn(1, 3, 256, 256) * 0.3)

    predict(tmp_path / "out", store, member_of(Fixed(), size_px=[256, 256]), evidence_blocks=24)
    drops, facts = read(tmp_path / "out")
    expected = direct(store, Fixed(), (256, 256), True, drops, facts["block_px"])
    assert np.isfinite(drops[0]).sum() < facts["forwards"] <= 24
    assert "several_images" in (tmp_path / "out" / "predictions.csv").read_text()
    np.testing.assert_allclose(drops, expected, atol=3e-6)


def test_the_focus_drops_most_and_files_say_which_evidence_it_is(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    members = member_of(Darkness(), "one"), member_of(Darkness(seed=1), "two")
    assert "forwards of each of 2 models" in predict(out, store, *members)[0]
    drops, facts = read(out)
    alone = [direct(store, member.model, (512, 576), False, drops, facts["block_px"]) for member in members]
    np.testing.assert_allclose(drops, np.mean(alone, axis=0), atol=3e-6)
    block_px = facts["block_px"]
    row, column = np.unravel_index(np.nanargmax(drops[1]), drops[1].shape)
    assert (row, column) == (FOCUS[0] // 2 // block_px, FOCUS[2] // 2 // block_px)
    assert "occlusion" in (out / "predictions.csv").read_text()
    prediction = json.loads((out / "one" / "prediction.json").read_text())
    assert prediction["evidence"] == ["map", "occlusion"]
    assert "Evidence by occlusion" in (out / "one" / "report.html").read_text()
    assert {"heatmap.tiff", "occlusion.tiff", "occlusion.png"} <= {path.name for path in (out / "one").iterdir()}


def test_a_later_run_neither_loses_nor_lacks_the_evidence(store: Path, tmp_path: Path) -> None:
    out, member = tmp_path / "out", member_of(Darkness())
    predict(out, store, member, evidence="map")
    assert not (out / "one" / "occlusion.tiff").exists()
    assert predict(out, store, member, evidence_blocks=4)  # predicted again, as the evidence is asked for
    assert predict(out, store, member, evidence="map") == [] and (out / "one" / "occlusion.tiff").exists()
    assert predict(out, store, member, evidence_blocks=4) == []
    assert predict(out, store, member, evidence_blocks=8)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_ends_between_two_forwards_and_the_next_run_predicts_the_slide(
    store: Path, tmp_path: Path, ranks: int
) -> None:
    """The forwards of a large slide take many minutes; one rank is asked."""
    notes: list[str] = []

    def body(comm: Communicator) -> PredictionReport:
        seen: list[str] = notes if comm.rank == 0 else []
        wanted = lambda: any("occlusion 3 of" in note for note in seen)  # noqa: E731
        members, asked = [member_of(Darkness())], PredictOptions(evidence="occlusion", evidence_blocks=24)
        show = lambda slides, note: seen.append(note)  # noqa: E731
        return predict_slides(members, find_inputs([store]), tmp_path, comm, asked, progress=show, stop_wanted=wanted)

    reports = run_ranks(ranks, body)
    assert all(report.stopped and not report.done for report in reports)
    assert [note for note in notes if "occlusion" in note] == [
        f"one: occlusion {n} of {notes[0].split()[-1]}" for n in range(4)
    ]
    assert not (tmp_path / "one").exists()
    assert predict(tmp_path, store, member_of(Darkness()), evidence_blocks=24)


def test_what_cannot_be_occluded_is_refused() -> None:
    config = dict(member_of(Darkness()).config)
    tiles = InputSpec.of({**config, "tiles": {"size_px": 64, "stride_px": 64, "min_tissue": 0.1}})
    with pytest.raises(RequestError, match="checkpoint C has an encoder of tiles, whose heatmap already"):
        check_evidence("occlusion", tiles, "C")
    with pytest.raises(RequestError, match="an aggregator of features"):
        check_evidence("occlusion", InputSpec.of({**config, "features": {"length": 8}}), "C")
    check_evidence("map", tiles, "C")
    with pytest.raises(RequestError, match="--evidence gradcam: expected map or occlusion"):
        PredictOptions(evidence="gradcam")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"--evidence-blocks 9: .* together with --evidence occlusion"):
        PredictOptions(evidence_blocks=9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 30), st.sampled_from([1, 8]))
def test_blocks_cover_all_tissue_that_is_shown_once(seed: int, most: int, align_px: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(3, 12, 2).tolist())
    mask = rng.random(shape) < 0.3
    tissue = TissueGrid.under(mask, (8.0, 8.0), (shape[0] * 8 - 3, shape[1] * 8 - 5), (1.0, 1.0))
    view: View = make_view(tissue, (64, 64), "pack", align_px)
    if not view.pieces:
        return
    blocks = OcclusionBlocks.of(tissue, [view], align_px, most)
    assert blocks.block_px % align_px == 0 and len(blocks.covered) <= most
    times = np.zeros(view.size_px, int)
    for block in blocks.covered:
        for box in block.boxes:
            times[box.slices()] += 1
    for piece in view.pieces:
        source = np.kron(mask, np.ones((8, 8), bool))[piece.source.slices()]
        assert (times[piece.target.slices()][source] == 1).all()
    assert times.max(initial=0) <= 1
