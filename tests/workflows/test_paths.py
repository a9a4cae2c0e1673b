"""A folder where a file is to be written is a wrong request, answered before any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from workflows.commands import launch, simulate
from workflows.commands.bench import measure
from workflows.launch.scripts import Resources

COMMANDS: dict[str, Callable[[Path, Path], int]] = {
    "simulate": lambda config, folder: simulate.run(config, [], None, None, folder, as_json=False),
    "measure": lambda config, folder: measure.run(folder),
    "launch": lambda config, folder: launch.run(
        "local", config, [], None, launch.ScriptOptions(Resources(), path=folder)
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_is_no_file(tmp_path: Path, command: str) -> None:
    """The machine was measured for minutes, or the step forecast, and then the file could not be written."""
    config, folder = tmp_path / "run.yaml", tmp_path / "folder"
    config.write_text("data: {store: s, size_px: 64}\nmodel: {classes: 2}\nrun: {dir: r, steps: 1}\n")
    folder.mkdir()
    with pytest.raises(RequestError, match="folder is a folder; give the name of a file"):
        COMMANDS[command](config, folder)
    assert list(folder.iterdir()) == []
