"""What tests of the viewer share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pathology.view.predictions import make_predictions


@pytest.fixture(scope="session")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of predictions of one slide, whose file and store lie beside it; tests write annotations only."""
    return make_predictions(tmp_path_factory.mktemp("predicted"))
