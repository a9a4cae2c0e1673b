from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from workflows import inspect


def test_a_path_that_no_disk_takes_is_a_wrong_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=os.strerror(errno.ENAMETOOLONG)):
        inspect.run(tmp_path / ("x" * 300), None, as_json=False)
