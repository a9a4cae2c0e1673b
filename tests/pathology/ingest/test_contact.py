from __future__ import annotations

import base64
import io
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from skimage.filters import gaussian

from data.store.manifest import FAILED, SlideRecord, load_records
from data.store.slide_store import SlideStore, slide_path
from pathology.ingest.archive import IngestOptions, IngestReport, Request, ingest
from pathology.ingest.contact import BLUR, PEN, draw, write_contact
from pathology.ingest.thumbnail import OUTLINE, thumbnail_of_store
from tests.pathology.tiffs import MakeSlide, stained, write_slide

AT_ONE = IngestOptions(mpp=1.0)


def run(paths: list[Path], store: Path) -> IngestReport:
    return ingest(Request(paths, store, AT_ONE), workers=1)


class ContactPage(HTMLParser):
    """Collects what a page refers to, and its texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.refers: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.refers += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one slide that has ink, and blur in its upper half."""
    folder = tmp_path_factory.mktemp("marked")
    image = stained(1024, 1024).astype(np.float32)
    y, x = np.mgrid[:512, :512]
    image[256:768, 256:768] += (30 * np.sin(y / 7) * np.sin(x / 7))[..., None]
    image[256:512, 256:768] = gaussian(image[256:512, 256:768], 2.5, channel_axis=2)
    image[60:100, 100:900] = (40, 60, 150)
    write_slide(folder / "m.tiff", image.clip(0, 255).astype(np.uint8), mpp=1.0, levels=2)
    assert len(run([folder / "m.tiff"], folder / "store").done) == 1
    return folder / "store"


def test_outline_ink_and_blur_are_drawn(marked: Path) -> None:
    store = SlideStore.open(slide_path(marked, "m"))
    picture = draw(store, 900)
    assert (picture == OUTLINE).all(-1).sum() > 900
    plain = thumbnail_of_store(store, 900).drawn()
    changed = (picture != plain).any(-1)
    tinted = [(picture == (plain * 0.55 + np.array(c) * 0.45).astype(np.uint8)).all(-1) & changed for c in (PEN, BLUR)]
    assert tinted[0].mean() > 0.01 and tinted[1].mean() > 0.04
    assert not (changed & ~tinted[0] & ~tinted[1]).any()
    assert {"pen", "blur"} <= set(load_records(marked)["m"].flags)
    with Image.open(marked / "contact" / "m.png") as large, Image.open(marked / "contact" / "m.jpg") as small:
        assert large.size == (1024, 1024)
        assert max(small.size) == 240


def test_the_sheet_stands_alone(marked: Path) -> None:
    page = ContactPage((marked / "contact.html").read_text())
    assert "script" not in page.tags and "link" not in page.tags
    pictures = [ref for ref in page.refers if ref.startswith("data:image/jpeg;base64,")]
    assert len(pictures) == 1 and page.refers == ["contact/m.png", *pictures]
    with Image.open(io.BytesIO(base64.b64decode(pictures[0].partition(",")[2]))) as small:
        assert max(small.size) == 240
    assert "To check (1)" in page.texts and "pen" in page.texts


def test_names_and_reasons_are_escaped_and_failed_slides_come_first(tmp_path: Path, make_slide: MakeSlide) -> None:
    name = "<b>x & \"y\" 'z'"
    good = make_slide(f"{name}.tiff")
    store = tmp_path / "store"
    assert len(run([good], store).done) == 1
    SlideRecord("<img src=x>", "", FAILED, reason="<script>alert(1)</script> & more").save(store)
    text = write_contact(store).read_text()
    page = ContactPage(text)
    assert "script" not in page.tags and page.tags.count("img") == 1 and "http" not in text
    assert name in page.texts and "<script>alert(1)</script> & more" in page.texts
    assert page.texts.index("Failed (1)") < page.texts.index("No flags (1)")
    link = next(ref for ref in page.refers if ref.endswith(".png"))
    assert re.fullmatch(r"contact/[\w%.]+", link)


def test_a_name_that_is_no_text_is_linked_byte_by_byte(tmp_path: Path, make_slide: MakeSlide) -> None:
    odd = make_slide().rename(tmp_path / os.fsdecode(b"old\xffdisk.tiff"))
    assert len(run([odd], tmp_path / "store").done) == 1
    page = ContactPage((tmp_path / "store" / "contact.html").read_text(errors="surrogateescape"))
    assert "contact/old%FFdisk.png" in page.refers and "No flags (1)" in page.texts


def test_pictures_that_are_missing_are_made_again_and_damage_is_told(tmp_path: Path, make_slide: MakeSlide) -> None:
    store = tmp_path / "store"
    run([make_slide(f"{k}.tiff", seed=k) for k in range(2)], store)
    before = (store / "contact.html").read_text()
    (store / "contact" / "0.jpg").unlink()
    assert write_contact(store).read_text() == before
    (store / "contact" / "1.png").unlink()
    next((slide_path(store, "1") / "0").rglob("c/*/*/*")).unlink()
    page = ContactPage(write_contact(store).read_text())
    assert any(text.startswith("damaged: ") for text in page.texts) and "Failed (1)" in page.texts
