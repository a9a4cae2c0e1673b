from __future__ import annotations

import errno

import pytest

from hyfi_core.comm.alone import AloneCommunicator
from pathology.errors import SlideError
from pathology.predict.ensemble import on_every_rank


def test_a_slide_that_fails_for_a_file_names_it_first() -> None:
    """The table had "[Errno 28] …: 'path'"."""

    def write() -> None:
        raise OSError(errno.ENOSPC, "disk full: 0.0 MB are free", "out/slide")

    with pytest.raises(SlideError, match=r"^out/slide: disk full: 0.0 MB are free$"):
        on_every_rank(AloneCommunicator(), write)
