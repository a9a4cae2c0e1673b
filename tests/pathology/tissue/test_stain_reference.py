"""A reference of one's own: a slide becomes itself, a picture of the same stains gives the same, others are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.store.slide_store import SlideStore
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from pathology.tissue.stain_reference import stain_normalisation
from tests.pathology.slides import write_slide

H, E = np.array([0.65, 0.70, 0.29]), np.array([0.07, 0.99, 0.11])


def stained(strength: float, seed: int = 0, side: int = 768) -> np.ndarray:
    """(side, side, 3): a square of two stains on glass."""
    rng = np.random.default_rng(seed)
    coarse = rng.gamma(4, strength / 2, (2, side // 8, side // 8)) * np.array([1.0, 0.6])[:, None, None]
    coarse *= rng.random(coarse.shape) < 0.6
    amounts = np.kron(coarse, np.ones((1, 8, 8)))
    amounts[:, :64] = amounts[:, -64:] = amounts[:, :, :64] = amounts[:, :, -64:] = 0
    density = np.einsum("syx,sc->yxc", amounts, np.stack([H, E]))
    return np.clip(245 * np.exp(-density), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, store = tmp_path_factory.mktemp("slides"), tmp_path_factory.mktemp("store")
    for name, strength in (("pale", 0.3), ("dark", 0.6)):
        path = write_slide(folder / f"{name}.tiff", stained(strength))
        assert ingest_slide(path, store, IngestOptions(mpp=1.0), {"source_path": str(path)}).status == "done"
    return store


@pytest.mark.parametrize("method", ["macenko", "reinhard"])
def test_the_reference_becomes_itself_and_others_become_like_it(store: Path, method: str) -> None:
    stain = stain_normalisation(method, "dark", store, "data.stain_reference")  # type: ignore[arg-type]
    assert stain is not None and stain != stain_normalisation(method, None, store, "")  # type: ignore[arg-type]
    means = {}
    for name in ("pale", "dark"):
        slide = SlideStore.open(store / f"{name}.zarr")
        pixels = slide.read(Box(100, 200, 100, 200))
        colours = stain.of_slide(slide, name)
        assert colours is not None
        means[name] = (pixels.mean(), colours(pixels).mean())
    assert abs(means["dark"][1] - means["dark"][0]) < 12  # glass of 245 becomes white
    assert abs(means["pale"][1] - means["dark"][1]) < 0.5 * abs(means["pale"][0] - means["dark"][0])
    same = stain_normalisation(method, str(store / "dark.zarr"), store / "other", "")  # type: ignore[arg-type]
    assert same == stain


@pytest.mark.parametrize("method", ["macenko", "reinhard"])
def test_a_picture_is_a_reference(store: Path, tmp_path: Path, method: str) -> None:
    path = tmp_path / "tissue.png"
    Image.fromarray(stained(0.6, seed=1)).save(path)
    of_picture = stain_normalisation(method, str(path), store, "")  # type: ignore[arg-type]
    of_slide = stain_normalisation(method, "dark", store, "")  # type: ignore[arg-type]
    assert of_picture is not None and of_slide is not None
    for (name, ours), (_, theirs) in zip(of_picture.reference, of_slide.reference, strict=True):
        assert np.allclose(ours, theirs, rtol=0.35, atol=0.2), name


def test_what_is_no_reference_is_refused(store: Path, tmp_path: Path) -> None:
    white, text = tmp_path / "white.png", tmp_path / "text.png"
    Image.fromarray(np.full((300, 300, 3), 250, np.uint8)).save(white)
    text.write_text("no picture")
    for reference, said in (
        ("slide-9", "no slide of .* has this name, and there is no such file"),
        (str(white), "its colours cannot be measured"),
        (str(text), "cannot be read as a picture"),
    ):
        with pytest.raises(RequestError, match=f"data.stain_reference .*{said}"):
            stain_normalisation("macenko", reference, store, "data.stain_reference")
    assert stain_normalisation("none", None, store, "") is None


def test_a_damaged_slide_is_no_reference(tmp_path: Path) -> None:
    (tmp_path / "a.zarr").mkdir()
    with pytest.raises(RequestError, match=r"^data\.stain_reference a: .*a\.zarr"):
        stain_normalisation("macenko", "a", tmp_path, "data.stain_reference")


def test_a_picture_of_too_many_pixels_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.png"
    Image.fromarray(np.full((30, 40, 3), 250, np.uint8)).save(path)
    monkeypatch.setattr("pathology.tissue.stain_reference._MOST_PX", 1199)
    with pytest.raises(RequestError) as caught:
        stain_normalisation("macenko", str(path), tmp_path, "data.stain_reference")
    assert str(caught.value) == (
        f"data.stain_reference {path}: 40 × 30 px; give a part of at most 1,199 px, or ingest the slide and give its "
        "name"
    )
    monkeypatch.setattr("pathology.tissue.stain_reference._MOST_PX", 1200)
    with pytest.raises(RequestError, match="its colours cannot be measured"):
        stain_normalisation("macenko", str(path), tmp_path, "data.stain_reference")
