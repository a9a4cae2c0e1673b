"""A folder has one writer at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from workflows.launch.owner import FolderOwner, owner_of

ROOT = Path(__file__).parents[3]
HOLD = """
import sys, time
from pathlib import Path
from workflows.launch.owner import FolderOwner
owner = FolderOwner(Path(sys.argv[1]), "name another")
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_writer_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert owner_of(folder) is None
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    found = owner_of(folder)
    assert found is not None and found["pid"] == other.pid
    with pytest.raises(RequestError, match=rf"in use by process {other.pid} on .*; .* name another"):
        FolderOwner(folder, "name another")
    other.kill()
    other.wait()
    assert owner_of(folder) is None
    FolderOwner(folder, "name another").release()


def test_parts_have_a_writer_each_and_the_whole_none_beside_them(tmp_path: Path) -> None:
    first, second = FolderOwner(tmp_path, "", "1-of-2"), FolderOwner(tmp_path, "", "2-of-2")
    for part in ("1-of-2", ""):
        with pytest.raises(RequestError, match="in use by"):
            FolderOwner(tmp_path, "", part)
    first.release()
    second.release()
    whole = FolderOwner(tmp_path, "")
    with pytest.raises(RequestError, match="in use by"):
        FolderOwner(tmp_path, "", "1-of-2")
    whole.release()
    FolderOwner(tmp_path, "", "1-of-2").release()


def test_a_released_folder_is_free(tmp_path: Path) -> None:
    owner = FolderOwner(tmp_path, "")
    with pytest.raises(RequestError, match="in use by"):
        FolderOwner(tmp_path, "")
    owner.release()
    FolderOwner(tmp_path, "").release()


def test_a_withdrawn_owner_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    FolderOwner(tmp_path / "new", "").withdraw()
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").touch()
    FolderOwner(tmp_path / "old", "").withdraw()
    assert (tmp_path / "old" / "config.yaml").exists()
    FolderOwner(tmp_path / "old", "").release()
