"""A file is replaced as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.files import replacing, write_atomically


def test_a_file_is_replaced_when_the_context_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_atomically(path, b"old")
    with replacing(path) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old" and temporary.parent == tmp_path
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_after_an_error_the_file_is_unchanged_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_atomically(path, b"old")
    with pytest.raises(ValueError, match="stop"), replacing(path) as temporary:
        temporary.write_bytes(b"half of the n")
        raise ValueError("stop")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
