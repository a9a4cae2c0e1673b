"""What tests of commands and of training share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workflows.archive import make_store
from tests.workflows.runs import in_this_process


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small store of ``tests.workflows.archive``, one for all tests of a module; they do not write to it."""
    return make_store(tmp_path_factory.mktemp("archive"))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of ``hyfi train`` are this process's own: see ``in_this_process``."""
    with in_this_process(monkeypatch):
        yield
