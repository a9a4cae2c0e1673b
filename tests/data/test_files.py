"""A file or folder is replaced as a whole or not at all."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hyfi_core.files
from data.files import publish_directory, reason_of, replacing, restore_replaced, temporary_path, write_atomically


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


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A prepared folder, and the older one that it replaces."""
    final = tmp_path / "slide.zarr"
    prepared = temporary_path(final)
    for path, text in ((prepared, "new"), (final, "old")):
        path.mkdir()
        (path / "zarr.json").write_text(text)
    return prepared, final


@pytest.mark.skipif(sys.platform != "linux", reason="renames of Linux")
def test_a_folder_has_its_name_at_every_moment_of_its_replacement(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, final = folders
    seen: list[bool] = []

    def watching(step: Callable[..., object]) -> Callable[..., object]:
        def watched(*arguments: Any, **more: Any) -> object:
            result = step(*arguments, **more)
            seen.append(final.exists())
            return result

        return watched

    with monkeypatch.context() as patched:
        for name in ("rename", "replace", "unlink", "rmdir"):
            patched.setattr(os, name, watching(getattr(os, name)))
        publish_directory(prepared, final)
    assert seen and all(seen)
    assert (final / "zarr.json").read_text() == "new" and list(final.parent.iterdir()) == [final]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_link_is_replaced_and_what_it_points_to_stays(
    exchange: bool, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, final = folders
    elsewhere = final.rename(final.parent / "elsewhere")
    final.symlink_to(elsewhere)
    if not exchange:
        monkeypatch.setattr(hyfi_core.files, "_exchanged", lambda one, other: False)
    publish_directory(prepared, final)
    assert (final / "zarr.json").read_text() == "new" and (elsewhere / "zarr.json").read_text() == "old"
    assert sorted(final.parent.iterdir()) == [elsewhere, final]


def test_what_a_kill_left_aside_has_its_name_again_at_the_next_start(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, final = folders
    monkeypatch.setattr(hyfi_core.files, "_exchanged", lambda one, other: False)  # as on NFS
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path == prepared:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", killed)
        publish_directory(prepared, final)
    (aside,) = final.parent.glob("*.old-*")
    assert not final.exists()
    # Of a process that still runs: it is about to rename the other one.
    running = aside.rename(aside.with_name(f".slide.zarr.old-{socket.gethostname()}-{os.getppid()}"))
    restore_replaced(final.parent)
    assert running.is_dir() and not final.exists()
    with subprocess.Popen(["true"]) as ended:
        pass
    running.rename(running.with_name(f".slide.zarr.old-{socket.gethostname()}-{ended.pid}"))
    restore_replaced(final.parent)
    assert (final / "zarr.json").read_text() == "old" and not list(final.parent.glob("*.old-*"))


def test_too_many_open_files_name_the_limit_and_who_can_raise_it(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.EMFILE, "Too many open files")
    for limits, words in (
        ((64, 4096), "`ulimit -n 1024`"),
        ((64, resource.RLIM_INFINITY), "`ulimit -n 1024`"),
        ((64, 512), "`ulimit -n 512`"),
        ((64, 64), "administrator"),
        # The usual limit of Linux itself.
        ((1024, 1_048_576), "`ulimit -n 4096`"),
        ((1024, 1024), "administrator"),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        assert f"a process may have {limits[0]}:" in reason_of(error) and words in reason_of(error)
    assert reason_of(OSError(errno.EACCES, "Permission denied")) == "Permission denied"
