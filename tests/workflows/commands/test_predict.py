from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import tifffile
from starlette.testclient import TestClient

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.models.by_name import build_model
from hyfi_core.runtime.checkpoint import amend_model_json, save_checkpoint
from pathology.predict.options import PredictOptions
from pathology.view.gallery import Gallery
from pathology.view.scene import Scene
from pathology.view.server import make_app
from tests.conftest import ROOT, Hyfi
from tests.pathology.slides import draw_slide, member_of, write_slide
from tests.workflows.predictions import rows_of, save
from workflows.commands import predict
from workflows.commands.predict import PredictArguments, PredictionRequest, run
from workflows.launch import peer_watch
from workflows.launch.status import RunStatus


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("run") / "step-00000012")


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slides")
    write_slide(folder / "one.tiff", draw_slide())
    (folder / "empty.svs").touch()
    return folder


@pytest.mark.soak
def test_processes_with_one_folder_lose_no_rows(checkpoint: Path, tmp_path: Path) -> None:
    """Each wrote the table that it had read at its start, without the other's slides."""
    for name in ("one", "two", "three"):
        (tmp_path / "slides").mkdir(exist_ok=True)
        (tmp_path / "slides" / f"{name}.svs").touch()
    write_slide(tmp_path / "slides" / "whole.tiff", draw_slide())
    words = [sys.executable, "-m", "workflows", "predict", checkpoint, "slides", "--out", "out", "--part"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    parts = [subprocess.Popen([*words, f"{k}/3"], cwd=tmp_path, env=environment) for k in (1, 2, 3)]
    assert sorted(part.wait(timeout=280) for part in parts) == [1, 1, 1]  # each has a slide that fails
    assert {name: row["status"] for name, row in rows_of(tmp_path / "out").items()} == {
        "one": "failed",
        "three": "failed",
        "two": "failed",
        "whole": "done",
    }
    page = (tmp_path / "out" / "index.html").read_text()
    assert all(name in page for name in ("one", "two", "three", "whole"))


def test_no_rank_ends_before_the_page_is_written(
    checkpoint: Path, slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that sees a rank end with code 1, as there is a failed slide, may kill the one that writes."""
    world, written, early = threading.local(), threading.Event(), []

    def write_page(*given: Any) -> Path:
        time.sleep(0.3)
        written.set()
        return tmp_path / "index.html"

    monkeypatch.setattr(predict, "_write_page", write_page)
    monkeypatch.setattr(peer_watch, "join", lambda: world.comm)

    def body(comm: Communicator) -> int:
        world.comm = comm
        request = PredictionRequest([checkpoint], [slides], tmp_path / "out", None, PredictOptions(), (1, 1), False)
        code = predict._predict(request)
        early.extend([] if written.is_set() else [comm.rank])
        return code

    assert run_ranks(2, body) == [1, 1]
    assert early == []


def test_slides_of_one_name_keep_their_rows(hyfi_here: Hyfi, checkpoint: Path, tmp_path: Path) -> None:
    """Twins in one folder in one command; and a slide of another folder in a later one, which replaced the first."""
    for name in ("a/x.tif", "a/x.tiff", "a/y.tiff", "b/y.tiff"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    write_slide(tmp_path / "b" / "y.tiff", draw_slide())
    assert hyfi_here("predict", checkpoint, "a", "--out", "out").returncode == 1
    assert hyfi_here("predict", checkpoint, "b", "--out", "out").returncode == 0
    assert hyfi_here("predict", checkpoint, "b", "a/x.tiff", "--out", "out").returncode == 1
    rows = rows_of(tmp_path / "out")
    other = next(name for name in rows if name.startswith("y-"))
    paths = {"x.tif": "a/x.tif", "x.tiff": "a/x.tiff", "y": "a/y.tiff", other: "b/y.tiff"}
    assert {name: row["path"] for name, row in rows.items()} == {k: str(tmp_path / v) for k, v in paths.items()}
    assert [name for name, row in rows.items() if row["status"] == "done"] == [other]


@pytest.mark.mpi
def test_one_rank_and_two_give_the_same(
    hyfi: Hyfi, hyfi_here: Hyfi, checkpoint: Path, slides: Path, tmp_path: Path
) -> None:
    alone = hyfi_here("predict", checkpoint, slides, "--out", "a", "--json", OMP_NUM_THREADS="1")
    shared = hyfi("predict", checkpoint, slides, "--out", "b", "--json", "--ranks", "2", OMP_NUM_THREADS="1")
    for said in (alone, shared):
        assert said.returncode == 1, said.stderr
        assert said.stderr.count("the file is empty (0 bytes)") == 1
        told = json.loads(said.stdout.splitlines()[-1])
        assert told["done"] == ["one"]
        assert [one["slide_id"] for one in told["failed"]] == ["empty"]
    first, second = rows_of(tmp_path / "a"), rows_of(tmp_path / "b")
    assert first["one"].keys() == second["one"].keys()
    assert float(first["one"]["p_dark"]) == pytest.approx(float(second["one"]["p_dark"]), abs=2e-6)
    ours, theirs = (tifffile.imread(tmp_path / out / "one" / "heatmap.tiff") for out in "ab")
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.nanmax(np.abs(ours)))
    left = {path.name for path in (tmp_path / "b").iterdir() if path.name != ".owner"}
    assert left == {"one", "predictions.csv", "predictions.json", "cases.csv", "index.html"}


def test_corrupt_checkpoint_is_refused_and_nothing_written(hyfi_here: Hyfi, slides: Path, tmp_path: Path) -> None:
    folder = save(tmp_path / "broken")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    said = hyfi_here("predict", folder, slides / "one.tiff", "--out", "out")
    assert said.returncode == 2
    assert "model.safetensors" in said.stderr
    assert "Traceback" not in said.stderr
    assert not (tmp_path / "out").exists()


def test_requests_that_cannot_be_met(hyfi_here: Hyfi, checkpoint: Path, slides: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for kind, name in (("store", "manifest.csv"), ("run", "config.yaml")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / name).touch()
    other = save(tmp_path / "other")
    amend_model_json(other, {"class_names": ["dark", "light"]})
    for words, cause in (
        # The results lay among the files of a store or a run.
        ((checkpoint, slides / "one.tiff", "--out", "store"), "store is a store (it has manifest.csv)"),
        ((checkpoint, slides / "one.tiff", "--out", "run"), "run is a run (it has config.yaml)"),
        # A folder with its owner stayed behind.
        ((checkpoint, slides / "one.tiff", "--checkpoint", other, "--out", "out"), "cannot form an ensemble"),
        # The spread of both was 0.
        ((checkpoint, slides / "one.tiff", "--checkpoint", checkpoint, "--out", "out"), "are the same model"),
        ((checkpoint, "nowhere.svs", "--out", "out"), "no such file"),
        ((checkpoint, slides / "one.tiff", "--out", "file"), "file is a file"),
        ((checkpoint, slides / "one.tiff", "--out", "out", "--slide-mpp", "500"), "--slide-mpp 500"),
        ((checkpoint, slides / "one.tiff", "--out", "out", "--cells", "4x4"), "--cells 4x4: use rows and columns"),
        ((checkpoint, slides / "one.tiff", "--out", "out", "--cells", "0,2", "--ranks", "2"), "--cells 0,2"),
        ((checkpoint, slides / "one.tiff", "--out", "out", "--memory", "2GB"), "--memory 2GB needs --spill FOLDER"),
    ):
        said = hyfi_here("predict", *words)
        assert said.returncode == 2, said.stderr
        assert cause in said.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"file", "store", "run", "other"}


def test_an_mpp_that_is_not_used_is_named(
    checkpoint: Path, slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = PredictArguments(
        checkpoints=[checkpoint], inputs=[slides / "one.tiff"], out=tmp_path / "out", options={"slide_mpp": 0.4}
    )
    assert run(arguments) == 0
    assert "--slide-mpp 0.4 was not used for 1 slide, as" in capsys.readouterr().err
    page = (tmp_path / "out" / "index.html").read_text()
    assert f"<h1>Predictions of 1 slide: {tmp_path / 'out'}</h1>" in page
    assert run(replace(arguments, options={"slide_mpp": 0.4, "force_mpp": True})) == 0
    said = capsys.readouterr()
    assert "was not used" not in said.err and "), flags: mpp_assumed, mpp_replaced  " in said.out, said.out


def test_labels_of_an_external_test_set(hyfi_here: Hyfi, checkpoint: Path, slides: Path, tmp_path: Path) -> None:
    """A hospital's own table: names with the file's ending, another column, splits; also of slides predicted before."""
    (tmp_path / "clinic.csv").write_text(
        "slide_id,case_id,grade,split\none.tiff,P7,dark,test\nempty,P8,pale,val\nelsewhere,P9,dark,test\n"
    )
    first = hyfi_here("predict", checkpoint, slides / "one.tiff", "--out", "out")
    assert first.returncode == 0, first.stderr
    words = ("predict", checkpoint, slides, "--out", "out", "--labels", "clinic.csv", "--target", "grade")
    said = hyfi_here(*words, "--split", "test")
    assert said.returncode == 0, said.stderr
    assert "rows that match no slide       1  elsewhere" in said.stdout
    assert "read 'one.tiff' as 'one'" in said.stdout and "1 finished before" in said.stdout
    page = (tmp_path / "out" / "index.html").read_text()
    assert '"dark",1.0,' in page  # the label of the slide that was predicted without one
    assert list(rows_of(tmp_path / "out")) == ["one"]
    for more, cause in (
        (("--split", "train"), "--split train: none of the 2 slides is in it, by the column 'split'"),
        (("--split", "training"), "--split: given 'training'; allowed: train, val, test, all"),
        (("--target", "stage"), "no column 'stage'"),
    ):
        said = hyfi_here(*words, *more)
        assert said.returncode == 2, said.stderr
        assert cause in said.stderr
    said = hyfi_here("predict", checkpoint, slides, "--out", "out", "--target", "grade")
    assert said.returncode == 2 and "have no manifest to read it from; give --labels CSV" in said.stderr
    (tmp_path / "clinic.csv").write_text("slide_id,grade\nP-1,dark\nP-2,pale\n")
    said = hyfi_here(*words)
    assert said.returncode == 2 and "write each slide_id as in the store's manifest.csv" in said.stderr


PATCHES = """
import torch
from torch import nn

class Patches(nn.Module):
    \"\"\"Views the image as patches, as a ViT may, and pools them by attention: it has no feature map.\"\"\"

    def __init__(self, classes):
        super().__init__()
        self.embed, self.score, self.head = nn.Linear(3 * 32 * 32, 8), nn.Linear(8, 1), nn.Linear(8, classes)

    def forward(self, x):
        b, c, h, w = x.shape
        x = x.view(b, c, h // 32, 32, w // 32, 32).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * 32 * 32)
        x = self.embed(x).tanh()
        return self.head((self.score(x).softmax(1) * x).sum(1))
"""


@pytest.mark.parametrize("more", [(), ("--cells", "1,2")])
def test_a_model_without_a_map_predicts(
    hyfi_here: Hyfi, slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    """It trained for hours, and then its prediction was refused, as there was nothing for a heatmap."""
    (tmp_path / "their_patches.py").write_text(PATCHES)
    monkeypatch.syspath_prepend(tmp_path)
    described = {"name": "their_patches:Patches", "classes": 2}
    model = build_model(described)
    config = {**member_of(model).config, "model": described, "size_px": [320, 320], "align_px": 32}
    save_checkpoint(tmp_path / "c", weights=model.state_dict(), model={k: v for k, v in config.items() if k != "files"})
    said = hyfi_here("predict", "c", slides / "one.tiff", "--out", "out", *more)
    assert said.returncode == 0, said.stderr
    row = rows_of(tmp_path / "out")["one"]
    assert row["flags"] == "no_heatmap" and float(row["p_pale"]) + float(row["p_dark"]) == pytest.approx(1, abs=1e-5)
    left = {path.name for path in (tmp_path / "out" / "one").iterdir()}
    assert left == {"overlay.png", "prediction.json", "regions.geojson", "report.html", "thumbnail.jpg"}
    report = (tmp_path / "out" / "one" / "report.html").read_text()
    assert "There is no heatmap" in report and "scores.tiff" not in report and "--evidence occlusion" in report
    occlusion = ("--evidence", "occlusion", "--evidence-blocks", "12")
    said = hyfi_here("predict", "c", slides / "one.tiff", "--out", "out", *more, *occlusion)
    assert "one: occlusion covers blocks of 160 px (160 µm) one after the other: 12 forwards, about" in said.stdout, (
        said.stderr
    )
    assert rows_of(tmp_path / "out")["one"]["flags"] == "no_heatmap;occlusion"
    now = {path.name for path in (tmp_path / "out" / "one").iterdir()}
    assert now == left | {"occlusion.tiff", "occlusion.png"}
    report = (tmp_path / "out" / "one" / "report.html").read_text()
    assert "There is no heatmap" in report and "Evidence by occlusion" in report


def test_ranks_get_the_request_as_it_is(checkpoint: Path, slides: Path, tmp_path: Path) -> None:
    arguments = PredictArguments(
        checkpoints=[checkpoint],
        inputs=[slides, tmp_path / "größe \udc80"],
        out=tmp_path / "out",
        ranks=2,
        part="2/3",
        labels=tmp_path / "labels.csv",
        options={"slide_mpp": 0.1 + 0.2, "image": "trained", "tissue": "off"},
    )
    status, request = RunStatus(tmp_path), arguments.request()
    status.leave_body(partial(predict._predict, request))
    body = status.body()
    assert isinstance(body, partial) and body.func is predict._predict and body.args == (request,)


def test_a_slide_whose_name_is_not_utf_8_is_predicted_and_shown(
    hyfi_here: Hyfi, checkpoint: Path, slides: Path, tmp_path: Path
) -> None:
    """As of archives whose names are Latin-1: its files could not be written, and the table's page was a traceback."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "M\udcfcller.tiff").symlink_to(slides / "one.tiff")
    done = hyfi_here("predict", checkpoint, "in", "--out", "out")
    assert done.returncode == 0, done.stderr
    out, escaped = tmp_path / "out", "M\\udcfcller"
    details = json.loads((out / "M\udcfcller" / "prediction.json").read_text(encoding="utf-8"))
    assert details["slide_id"] == "M\udcfcller"
    assert json.loads((out / "M\udcfcller" / "regions.geojson").read_text(encoding="utf-8"))["features"]
    assert escaped in (out / "M\udcfcller" / "report.html").read_text(encoding="utf-8")
    page = (out / "index.html").read_text(encoding="utf-8")
    assert escaped.replace("\\", "\\\\") in page and "M%FCller/report.html" in page
    with tifffile.TiffFile(out / "M\udcfcller" / "heatmap.tiff") as heatmap:
        assert escaped in (heatmap.ome_metadata or "")
    with TestClient(make_app(Scene(Gallery.of([out]), 10**7), "token"), "http://127.0.0.1/token/") as client:
        (slide,) = client.get("slides.json").json()["slides"]
        address = quote(slide["key"], safe="")
        assert slide["key"] == escaped and client.get(f"slide/{address}/about.json").status_code == 200
        opened = client.get(f"open/0/{address}", follow_redirects=False)
        assert opened.headers["location"] == f"../../view?slide={address}"
        assert escaped in client.get(f"cohort/0/{address}/report.html").text
        (out / "index.html").unlink()  # as of earlier versions
        assert escaped in client.get("cohort/0/").text


@pytest.mark.mpi
def test_variables_left_over_from_a_launcher_are_named(
    hyfi: Hyfi, checkpoint: Path, slides: Path, tmp_path: Path
) -> None:
    """`hyfi predict` took them for a launcher of one rank, and its advice did not help."""
    said = hyfi("predict", checkpoint, slides, "--out", "out", "--ranks", "2", PMI_SIZE="1", PMI_RANK="0")
    assert said.returncode == 2 and "--ranks 2: 1 were started" in said.stderr, said.stderr
    assert "left over from an earlier one: start it with `env -u PMI_" in said.stderr and not list(tmp_path.glob("out"))


def test_only_a_launcher_starts_a_rank(hyfi_here: Hyfi) -> None:
    said = hyfi_here("rank", "predict")
    assert said.returncode == 2 and "give it --ranks" in said.stderr
