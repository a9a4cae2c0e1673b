from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from pathology.errors import SlideError
from pathology.ingest.archive import IngestOptions, Request, ingest
from pathology.predict.cohort import predict_slides
from pathology.predict.inputs import find_inputs
from pathology.predict.options import PredictOptions
from pathology.readers.sources import open_source
from pathology.view.gallery import Gallery, GallerySlide
from pathology.view.pixels import ShownSlide
from pathology.view.scene import Scene
from pathology.view.server import make_app, new_token
from pathology.view.web_files import static_file
from tests.pathology.readers.facts.test_pictures import about, write_scenes
from tests.pathology.slides import Darkness, draw_slide, member_of, write_slide
from tests.pathology.tiffs import MakeSlide
from tests.pathology.view.predictions import SLIDE_ID

TOKEN = new_token()


def client_of(gallery: Gallery) -> TestClient:
    return TestClient(make_app(Scene(gallery, 10**7), TOKEN), f"http://127.0.0.1/{TOKEN}/", follow_redirects=False)


@pytest.fixture(scope="module")
def client(predictions: Path) -> Iterator[TestClient]:
    with client_of(Gallery.of([predictions])) as client:
        yield client


def test_nothing_is_answered_without_the_token(client: TestClient) -> None:
    wrong = ["", "/", "/view", f"/{new_token()}/view", f"/{TOKEN[:-1]}/", f"/x/{TOKEN}/", f"/view?token={TOKEN}"]
    for path in [*wrong, f"/{TOKEN.lower()}/slides.json", "/é/", "/%2e%2e/" + TOKEN]:
        answer = client.get("http://127.0.0.1" + path)
        assert answer.status_code == 403, path
        assert "token" in answer.text and SLIDE_ID not in answer.text
    assert client.put(f"http://127.0.0.1/slide/{SLIDE_ID}/annotations.json", content=b"{}").status_code == 403
    assert client.get("slides.json").status_code == 200
    assert len({new_token() for _ in range(20)}) == 20 and len(TOKEN) >= 32


@pytest.mark.parametrize(
    "path",
    [
        "slide/../about.json",
        "slide/..%2f..%2fstore/about.json",
        "slide/%2fetc%2fpasswd/about.json",
        "static/..%2fserver.py",
        "static/%2e%2e/server.py",
        "static/__init__.py",
        "cohort/0/..%2f..%2fone/report.html",
        "cohort/0/../report.html",
        "cohort/1/",
        "cohort/0/two/report.html",
        "open/0/two",
        "slide/two/about.json",
        "slide/one/tile/9/0/0.png",
        "slide/one/tile/3/900/0.png",
        "slide/one/tile/3/0/0.gif",
        "slide/one/layer/9/0/0/0.png",
        "slide/one/layer/-1/0/0/0.png",
        "slide/one/layer/..%2f/0/0/0.png",
    ],
)
def test_what_is_not_in_the_gallery_is_not_found(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "Traceback" not in answer.text


def test_tiles_are_the_readers_pixels_bit_for_bit(make_slide: MakeSlide) -> None:
    path = make_slide("slide.tiff", size=(700, 900))
    expected = open_source(path).read(Box.of_size(700, 900), 0)
    with client_of(Gallery.of([path])) as client:
        about = client.get("slide/slide/about.json").json()
        assert (about["height_px"], about["width_px"], about["finest_zoom"]) == (700, 900, 2)
        for row in range(3):
            for column in range(4):
                answer = client.get(f"slide/slide/tile/2/{row}/{column}.png")
                assert answer.headers["content-type"] == "image/png"
                pixels = np.asarray(Image.open(io.BytesIO(answer.content)))
                part = expected[row * 256 : row * 256 + 256, column * 256 : column * 256 + 256]
                assert np.array_equal(pixels[: part.shape[0], : part.shape[1]], part)
                assert (pixels[part.shape[0] :] == 255).all() and (pixels[:, part.shape[1] :] == 255).all()
        assert client.get("slide/slide/tile/1/0/0.jpg").headers["content-type"] == "image/jpeg"


def test_the_table_of_predictions_leads_to_its_slides(client: TestClient) -> None:
    first = client.get("")
    assert first.status_code == 302 and first.headers["location"] == "cohort/0/"
    table = client.get("cohort/0/").text
    assert '<meta name="hyfi-viewer" content="../../open/0/">' in table
    opened = client.get(f"open/0/{SLIDE_ID}")
    assert opened.status_code == 302 and opened.headers["location"] == f"../../view?slide={SLIDE_ID}"
    assert client.get("view").text.startswith("<!DOCTYPE html>")
    assert "<html" in client.get(f"cohort/0/{SLIDE_ID}/report.html").text
    (slide,) = client.get("slides.json").json()["slides"]
    assert slide == {"key": SLIDE_ID, "prediction": slide["prediction"], "reason": ""} and slide["prediction"]


def test_a_table_that_knows_no_viewer_is_shown_as_a_list(predictions: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    table = (predictions / "predictions.csv").read_text().replace(f"\n{SLIDE_ID},", "\na <b> & c,")
    (old / "predictions.csv").write_text(table)
    (old / "index.html").write_text("<html><head></head></html>")
    with client_of(Gallery.of([old])) as client:
        page = client.get("cohort/0/").text
        assert 'href="../../view?slide=a%20%3Cb%3E%20%26%20c"' in page and "a &lt;b&gt; &amp; c" in page


def test_the_page_needs_no_network_and_its_parts_are_there(client: TestClient) -> None:
    page = client.get("view")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["referrer-policy"] == "no-referrer"  # the address holds the token
    for name in (
        "leaflet.js",
        "leaflet.css",
        "viewer.css",
        "main.js",
        "pane.js",
        "drawing.js",
        "slide_annotations.js",
        "page.js",
    ):
        answer = client.get(f"static/{name}")
        assert answer.status_code == 200
        if not name.startswith("leaflet"):
            assert "http" not in answer.text
    assert static_file("nothing.js") is None
    assert b"https://" not in page.content and b"http://" not in page.content


def test_annotations_come_back_after_a_new_start(predictions: Path, client: TestClient) -> None:
    address = f"slide/{SLIDE_ID}/annotations.json"
    empty = client.get(address)
    assert empty.json()["features"] == []
    ring = [[100, 50], [180, 50], [180, 90.25], [100, 50]]
    feature = {
        "type": "Feature",
        "id": "a",
        "geometry": {"type": "Polygon", "coordinates": [ring]},
        "properties": {"objectType": "annotation", "classification": {"name": "Tumor", "color": [200, 0, 0]}},
    }
    body = json.dumps({"type": "FeatureCollection", "features": [feature]})
    saved = client.put(address, content=body, headers={"If-Match": empty.headers["etag"]})
    assert saved.status_code == 200
    path = predictions / "annotations" / f"{SLIDE_ID}.geojson"
    assert json.loads(path.read_text())["features"][0] == feature
    again = client.put(address, content=body, headers={"If-Match": empty.headers["etag"]})
    assert again.status_code == 200 and again.headers["etag"] == saved.headers["etag"]  # its answer was lost
    late = client.put(address, content=b"[]", headers={"If-Match": empty.headers["etag"]})
    assert late.status_code == 412 and "somebody else" in late.json()["error"]
    assert client.put(address, content=b"{", headers={"If-Match": saved.headers["etag"]}).status_code == 422
    with client_of(Gallery.of([predictions])) as again:
        assert again.get(address).json()["features"] == [feature]
        assert again.get(address).headers["etag"] == saved.headers["etag"]
    path.unlink()


def test_the_same_place_is_annotated_whatever_the_slide_is_shown_from(predictions: Path, tmp_path: Path) -> None:
    point = {"type": "Feature", "geometry": {"type": "Point", "coordinates": [400, 300]}, "properties": {}}
    body = json.dumps({"type": "FeatureCollection", "features": [point]})
    slide = predictions.parent / f"{SLIDE_ID}.tiff"
    address = f"slide/{SLIDE_ID}/annotations.json"
    with client_of(Gallery.of([slide], tmp_path)) as client:
        assert client.put(address, content=body, headers={"If-Match": '"none"'}).status_code == 200
    with client_of(Gallery.of([predictions.parent / "store"], tmp_path)) as client:
        assert client.get(address).json()["features"][0]["geometry"]["coordinates"] == [200, 150]


def test_without_a_place_for_them_annotations_are_not_saved(predictions: Path) -> None:
    slide = predictions.parent / f"{SLIDE_ID}.tiff"
    before = sorted(predictions.parent.iterdir())
    with client_of(Gallery.of([slide])) as client:
        about = client.get(f"slide/{SLIDE_ID}/about.json").json()["annotations"]
        assert not about["saved"] and "--annotations" in about["reason"]
        body = b'{"type": "FeatureCollection", "features": []}'
        answer = client.put(f"slide/{SLIDE_ID}/annotations.json", content=body)
        assert answer.status_code == 409 and "--annotations" in answer.json()["error"]
    assert sorted(predictions.parent.iterdir()) == before


def test_a_slide_that_does_not_open_is_listed_with_its_reason(make_slide: MakeSlide, tmp_path: Path) -> None:
    good = make_slide("good.tiff")
    bad = good.with_name("bad.svs")
    bad.write_bytes(b"")
    gallery = Gallery.of([good, bad])
    assert gallery.try_all().keys() == {"bad"}
    with client_of(gallery) as client:
        found = {one["key"]: one["reason"] for one in client.get("slides.json").json()["slides"]}
        assert found == {"good": "", "bad": "the file is empty (0 bytes)"}
        answer = client.get("slide/bad/about.json")
        assert answer.status_code == 409 and answer.json() == {"error": "the file is empty (0 bytes)"}
        assert client.get("slide/good/tile/0/0/0.jpg").status_code == 200


def test_what_is_no_slide_is_refused_with_what_would_work(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("no slide")
    with pytest.raises(RequestError, match=r"notes\.txt: cannot be shown .* give a store"):
        Gallery.of([notes])
    with pytest.raises(RequestError, match="no such file or folder"):
        Gallery.of([tmp_path / "missing"])
    with pytest.raises(RequestError, match="no slide in this folder"):
        Gallery.of([tmp_path])
    (tmp_path / "predictions.csv").write_text("a,b\n1,2\n")
    with pytest.raises(RequestError, match="not the table of a prediction"):
        Gallery.of([tmp_path])
    (tmp_path / "predictions.csv").write_text("slide_id,path,prediction\n../x,a.svs,\n")
    with pytest.raises(RequestError, match="is not valid as a name"):
        Gallery.of([tmp_path])


def test_slides_that_are_gone_are_named_and_few_are_held_open(
    make_slide: MakeSlide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pathology.view.gallery.MAX_OPEN", 2)
    paths = [make_slide(f"{name}.tiff", size=(300, 300)) for name in "abcd"]
    gallery = Gallery.of(paths)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with gallery.opened("a") as held:
        assert gallery.try_all() == {}
        assert held.read(Box(0, 2, 0, 2), 0).shape == (2, 2, 3)  # in use: not closed under its reader
    gallery.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "predictions.csv").write_text("slide_id,path,prediction\ngone,gone.svs,x\n")
    assert "give its store or folder" in Gallery.of([tmp_path / "results"]).try_all()["gone"]


def test_a_slide_that_is_slow_to_open_does_not_keep_others_waiting(
    make_slide: MakeSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery = Gallery.of([make_slide(f"{name}.tiff", size=(300, 300)) for name in "ab"])
    go_on, begun, opened, open_now = threading.Event(), threading.Event(), [], GallerySlide.open

    def slow(slide: GallerySlide, slide_mpp: float | None) -> ShownSlide:
        opened.append(slide.key)
        if slide.key == "a":
            begun.set()
            assert go_on.wait(20)
        return open_now(slide, slide_mpp)

    def held(key: str) -> ShownSlide:
        with gallery.opened(key) as slide:
            return slide

    monkeypatch.setattr(GallerySlide, "open", slow)
    with ThreadPoolExecutor(3) as pool:
        slow_ones = [pool.submit(held, "a") for _ in range(2)]
        try:
            assert begun.wait(10)
            pool.submit(held, "b").result(10)
        finally:
            go_on.set()
        assert slow_ones[0].result() is slow_ones[1].result()
    assert sorted(opened) == ["a", "b"]  # each once
    gallery.close()


def test_a_slide_that_fails_to_open_is_tried_again_and_holds_nothing(
    make_slide: MakeSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery = Gallery.of([make_slide("a.tiff", size=(300, 300))])
    before = len(list(Path("/proc/self/fd").iterdir()))

    def failing(slide: GallerySlide, slide_mpp: float | None) -> ShownSlide:
        raise SlideError("not now")

    with monkeypatch.context() as failed:
        failed.setattr(GallerySlide, "open", failing)
        assert gallery.try_all() == {"a": "not now"} and not gallery._open
    with gallery.opened("a"):
        gallery.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    with pytest.raises(KeyError), gallery.opened("b"):
        pass
    assert not gallery._open


def test_a_predicted_slide_has_the_pixel_size_that_was_used(tmp_path: Path) -> None:
    slide = write_slide(tmp_path / "bare.tiff", draw_slide(), mpp=None)
    options = PredictOptions(slide_mpp=0.5)
    report = predict_slides(
        [member_of(Darkness())], find_inputs([slide]), tmp_path / "out", AloneCommunicator(), options
    )
    assert [one.slide_id for one in report.done] == ["bare"]
    with client_of(Gallery.of([tmp_path / "out"])) as client:
        about = client.get("slide/bare/about.json").json()
        assert about["mpp"] == [0.5, 0.5] and "unknown" not in json.dumps(about) and about["tissue"]
    with client_of(Gallery.of([slide])) as client:
        assert client.get("slide/bare/about.json").json()["mpp"] is None
    with client_of(Gallery.of([slide], slide_mpp=0.25)) as client:
        assert client.get("slide/bare/about.json").json()["mpp"] == [0.25, 0.25]


def test_a_heatmap_is_never_drawn_over_another_slide_of_its_name(tmp_path: Path) -> None:
    """Scanners count from 1: a slide of the same name lies at the path of the table, or in a store that is given."""
    slide = write_slide(tmp_path / "one.tiff", draw_slide())
    out, same, other = tmp_path / "out", tmp_path / "same", tmp_path / "other"
    ingest(Request([slide], same, IngestOptions(mpp=2.0)), workers=1)
    predict_slides([member_of(Darkness())], find_inputs([slide]), out, AloneCommunicator())
    for paths in ([out], [out, same], [out, slide]):
        assert not Gallery.of(paths).try_all()
    write_slide(slide, draw_slide(900))
    ingest(Request([slide], other, IngestOptions(mpp=2.0)), workers=1)
    for paths in ([out], [out, other], [out, slide]):
        reasons = Gallery.of(paths).try_all()
        assert "is not the slide of this name that was predicted" in reasons["one"], paths
    assert not Gallery.of([other]).try_all() and not Gallery.of([out, same]).try_all()


def test_each_predicted_scene_is_shown_as_the_one_that_it_is(tmp_path: Path) -> None:
    pictures = [draw_slide(900, 2000), draw_slide(1000, 2000)]
    path = write_scenes(tmp_path / "two.ome.tif", [(picture, about()) for picture in pictures])
    predict_slides([member_of(Darkness())], find_inputs([path]), tmp_path / "out", AloneCommunicator())
    with client_of(Gallery.of([tmp_path / "out"])) as client:
        for scene, picture in enumerate(pictures, 1):
            facts = client.get(f"slide/two_scene{scene}/about.json").json()
            assert (facts["height_px"], facts["width_px"]) == picture.shape[:2]
