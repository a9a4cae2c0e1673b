from __future__ import annotations

import os
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from workflows.launch.compile_cache import VARIABLE, keep_compiled, on_gpu


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, "before")  # so that it is restored afterwards
    monkeypatch.delenv(VARIABLE)
    return tmp_path / "cache"


def test_compiled_code_is_kept_in_the_users_own_folder(home: Path) -> None:
    keep_compiled(None)
    place = home / "hyfi" / "compile"
    assert os.environ[VARIABLE] == str(place) and place.stat().st_mode & 0o777 == 0o700


def test_settings_of_pytorch_and_of_the_run_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "theirs")
    keep_compiled(None)
    assert os.environ[VARIABLE] == "theirs"
    keep_compiled(tmp_path / "mine")
    assert os.environ[VARIABLE] == str(tmp_path / "mine")


def test_a_folder_that_others_write_is_not_loaded_from(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(RequestError, match=r"run\.compile_cache: .*shared may be written by other users"):
        keep_compiled(shared)
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="cannot be made"):
        keep_compiled(tmp_path / "file" / "below")
    home.write_text("in the way")
    keep_compiled(None)
    assert VARIABLE not in os.environ and "compiled code is not kept there" in capsys.readouterr().err


def test_runs_that_compile_nothing_have_no_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On CPUs ``auto`` compiles nothing; with a home that cannot be written, each rank warned."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not on_gpu("auto") and not on_gpu("cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert on_gpu("auto") and not on_gpu("cpu")
    home.write_text("in the way")
    keep_compiled(None, warns=False)
    assert not capsys.readouterr().err
