"""Links to checkpoints, and which of them stay."""

from __future__ import annotations

from pathlib import Path

import pytest

import hyfi_core.files
from hyfi_core.runtime.checkpoint import load_checkpoint, save_checkpoint
from hyfi_core.runtime.saving import kept_checkpoints as kept


def test_links_and_pruning(tmp_path: Path) -> None:
    for number in range(1, 7):
        save_checkpoint(kept.step_folder(tmp_path, number), weights={}, model={"step": number})
    kept.point_link(tmp_path / "best", "step-00000001")
    kept.point_link(tmp_path / "best", "step-00000002")
    kept.point_link(tmp_path / "latest", "step-00000006")
    (tmp_path / ".step-00000009.tmp-dead").mkdir()
    (tmp_path / ".best.tmp-dead").symlink_to("step-00000001")  # would keep it for ever
    kept.remove_leftovers(tmp_path)
    assert kept.prune(tmp_path, keep=2, spare=[3]) == [1, 4]
    assert kept.saved_steps(tmp_path) == [2, 3, 5, 6]
    assert load_checkpoint(tmp_path / "best").path.name == "step-00000002"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_checkpoint_that_a_kill_left_aside_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = kept.step_folder(tmp_path, 3)
    save_checkpoint(folder, weights={}, model={"step": 3})
    kept.point_link(tmp_path / "latest", folder.name)
    monkeypatch.setattr(hyfi_core.files, "_exchanged", lambda one, other: False)  # as on NFS
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path == folder:
            return rename(path, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", killed)
        save_checkpoint(folder, weights={}, model={"step": 4})
    assert not folder.exists()
    for path in (folder, tmp_path / "latest"):
        assert load_checkpoint(path).model["step"] == 3
    kept.remove_leftovers(tmp_path)
    assert kept.saved_steps(tmp_path) == [3] and load_checkpoint(folder).path == folder
    # The next one replaces it, and nothing of the older one stays.
    hyfi_core.files.replaced_name(folder).mkdir()
    save_checkpoint(folder, weights={}, model={"step": 4})
    assert load_checkpoint(folder).model["step"] == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", folder.name]
