"""Folders of launchers that were killed are removed by the next one, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.patience import PATIENCE_S
from workflows.launch.own_folder import PREFIX, own_folder

KILLED = """
import os, sys
from pathlib import Path
from workflows.launch.own_folder import own_folder
with own_folder(Path(sys.argv[1])) as folder:
    (folder / "pid-0").write_text("1")
    os.kill(os.getpid(), 9)
"""


def test_the_folder_of_a_killed_launcher_is_removed_by_the_next(tmp_path: Path) -> None:
    words = [sys.executable, "-c", KILLED, str(tmp_path)]
    subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False, timeout=PATIENCE_S)
    (left,) = tmp_path.iterdir()
    with own_folder(tmp_path) as folder:
        assert not left.exists()
        assert list(tmp_path.iterdir()) == [folder]
    assert not list(tmp_path.iterdir())


def test_folders_in_use_and_what_is_not_a_launcher_s_stay(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to("other")
    (tmp_path / f"{PREFIX}file").touch()
    with own_folder(tmp_path) as first, own_folder(tmp_path) as second:
        assert first.is_dir() and second.is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{PREFIX}file", f"{PREFIX}link", "other"]


def test_folders_of_other_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{PREFIX}abandoned").mkdir()
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with own_folder(tmp_path):
        pass
    assert (tmp_path / f"{PREFIX}abandoned").exists()


def test_many_launchers_that_start_together_keep_their_folders(tmp_path: Path) -> None:
    """Each cleans while others make theirs; a new folder is not yet locked for a moment."""
    lost: list[Path] = []

    def launch() -> None:
        for _ in range(100):
            with own_folder(tmp_path) as folder:
                (folder / "pid-0").touch()
                if not (folder / "pid-0").exists():
                    lost.append(folder)

    threads = [threading.Thread(target=launch) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == [] and list(tmp_path.iterdir()) == []
