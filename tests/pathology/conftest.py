"""What tests of pathology may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pathology.tiffs import MakeSlide, stained, write_slide


@pytest.fixture
def make_slide(tmp_path: Path) -> MakeSlide:
    """Return a function that writes a slide: ``make_slide(name, size=(700, 900), seed=0, **for_write_slide)``."""

    def make(name: str = "a.tiff", size: tuple[int, int] = (700, 900), seed: int = 0, **how: object) -> Path:
        path = tmp_path / "slides" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_slide(path, stained(*size, seed), **how)  # type: ignore[arg-type]

    return make
