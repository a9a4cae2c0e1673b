"""What another account on the host may read: real processes of another user, where the tests run as root."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data.files import private_folder
from data.location import location
from data.store.layout import LevelSize, pyramid_levels
from data.store.node_cache import NodeCache
from data.store.unfinished import make_private, working_folder
from data.store.writer import SlideWriter

NOBODY = 65534
STORE = location("memory://bucket/store")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory as hosts have it, which everybody may write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield folder


def readable(path: Path) -> bool:
    """Whether the other account can read a file, or list a folder."""
    command = ["ls", str(path)] if path.is_dir() else ["cat", str(path)]
    return subprocess.run(command, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True).returncode == 0


@needs_root
def test_the_other_account_reads_what_everybody_may_read(shared: Path) -> None:
    (shared / "x").write_text("x")
    assert readable(shared) and readable(shared / "x")


@needs_root
def test_a_folder_that_another_account_made_first_is_refused(shared: Path) -> None:
    uploads = working_folder(STORE).parent
    for make in (lambda: uploads.mkdir(mode=0o777), lambda: uploads.symlink_to(shared, target_is_directory=True)):
        make()
        os.chown(uploads, NOBODY, NOBODY, follow_symlinks=False)
        for using in (lambda: make_private(STORE), lambda: NodeCache(uploads, 10**6)):
            with pytest.raises(PermissionError, match="belongs to another user"):
                using()
        uploads.unlink() if uploads.is_symlink() else uploads.rmdir()


@needs_root
def test_pixels_on_their_way_to_a_bucket_are_not_read(shared: Path) -> None:
    with SlideWriter(STORE, "a", pyramid_levels([LevelSize(64, 64)], 1.0), identity={"x": 1}) as writer:
        writer.write(0, 0, 0, np.zeros((3, 64, 64), np.uint8))
        files = [path for path in working_folder(STORE).rglob("*") if path.is_file()]
        assert files and not any(map(readable, files)) and not readable(working_folder(STORE).parent)


def test_a_folder_of_ones_own_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o755)
    (tmp_path / "mine").chmod(0o755)
    private_folder(tmp_path / "mine")
    private_folder(tmp_path / "new" / "below")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("mine", "new/below")] == [0o700, 0o700]
    with pytest.raises(PermissionError, match="is a link"):
        (tmp_path / "link").symlink_to(tmp_path / "mine", target_is_directory=True)
        private_folder(tmp_path / "link")
