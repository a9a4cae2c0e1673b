from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import ImageCms

from hyfi_core.plan.box import Box
from pathology.errors import SlideError
from pathology.ingest.content import ToSrgb
from pathology.readers.sources import open_source
from tests.pathology.readers.scanners import smooth


def profile_of_gamma(gamma: float) -> bytes:
    """Return a display profile with sRGB's primaries and a plain power for its curve (ICC.1:2001, built by hand)."""
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    count = int.from_bytes(srgb[128:132], "big")
    data = bytearray(srgb)
    curve = b"curv" + bytes(4) + (1).to_bytes(4, "big") + round(gamma * 256).to_bytes(2, "big") + bytes(2)
    place = len(data)
    data += curve
    for k in range(count):
        entry = 132 + 12 * k
        if data[entry : entry + 4] in (b"rTRC", b"gTRC", b"bTRC"):
            data[entry + 4 : entry + 12] = place.to_bytes(4, "big") + (14).to_bytes(4, "big")
    data[0:4] = len(data).to_bytes(4, "big")
    return bytes(data)


def expected(pixels: np.ndarray, gamma: float) -> np.ndarray:
    linear = (pixels / 255) ** gamma
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def test_colours_are_those_that_the_profile_describes() -> None:
    pixels = smooth(90, 70)
    found = ToSrgb(profile_of_gamma(1.0))(pixels)
    assert found.dtype == np.uint8 and np.abs(found - expected(pixels, 1.0)).max() <= 2.5
    assert np.abs(found.astype(int) - pixels).max() > 50
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert np.abs(ToSrgb(srgb)(pixels).astype(int) - pixels).max() <= 1


def test_planes_threads_and_copies_give_the_same() -> None:
    pixels = smooth(90, 70)
    convert = ToSrgb(profile_of_gamma(1.8))
    once = convert(pixels)
    assert np.array_equal(convert.planes(np.ascontiguousarray(pixels.transpose(2, 0, 1))), once.transpose(2, 0, 1))
    assert np.array_equal(pickle.loads(pickle.dumps(convert))(pixels), once)
    with ThreadPoolExecutor(4) as pool:
        assert all(np.array_equal(found, once) for found in pool.map(convert, [pixels] * 12))


def test_what_is_no_profile_of_rgb_is_refused() -> None:
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    for profile in (b"", b"no profile", lab):
        with pytest.raises(SlideError, match="ICC profile"):
            ToSrgb(profile)


def test_a_source_gives_its_profile_and_its_pixels_as_stored(tmp_path: Path) -> None:
    image, profile = smooth(300, 300), profile_of_gamma(1.8)
    for name in ("a.tif", "a.ome.tif"):
        tifffile.imwrite(tmp_path / name, image, photometric="rgb", tile=(128, 128), iccprofile=profile, metadata=None)
        source = open_source(tmp_path / name)
        assert source.icc == profile
        assert np.array_equal(source.read(Box.of_size(300, 300), 0), image)


@pytest.mark.slides
def test_the_profile_of_a_real_slide_can_be_applied() -> None:
    folder = os.environ.get("HYFI_TEST_SLIDES")
    if not folder:
        pytest.skip("HYFI_TEST_SLIDES does not name a folder of real slides")
    source = open_source(Path(folder) / "TCGA-CR-7395-01A-01-TS1.svs")
    assert source.icc is not None
    pixels = source.read(Box(1000, 1100, 1000, 1100), 0)
    assert ToSrgb(source.icc)(pixels).shape == pixels.shape
