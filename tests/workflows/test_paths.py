"""A folder where a file is to be written is a wrong request, answered before any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from workflows.commands import inspect, launch, simulate, validate
from workflows.commands.bench import measure
from workflows.launch.scripts import Resources
from workflows.paths import require_replaceable

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


@pytest.mark.parametrize("command", [*COMMANDS, "inspect"])
def test_a_file_of_another_kind_is_not_replaced(tmp_path: Path, command: str) -> None:
    """The slide, or the YAML, that was named once too often was lost."""
    run = COMMANDS.get(command, lambda config, target: inspect.run(config, target, as_json=False))
    config = tmp_path / "run.yaml"
    config.write_text(content := "{data: {store: s, size_px: 64}, model: {classes: 2}, run: {dir: r, steps: 1}}\n")
    with pytest.raises(RequestError, match=r"run.yaml exists and is not a .*: it would be lost"):
        run(config, config)
    assert config.read_text() == content


def test_predictions_are_not_replaced_by_an_evaluation(tmp_path: Path) -> None:
    """Its ``predictions.csv`` has the slides of one split, and has no place for the others."""
    (tmp_path / "predictions.json").write_text("{}")
    with pytest.raises(RequestError, match="has predictions of hyfi predict"):
        validate.run(validate.EvaluationRequest(tmp_path / "checkpoint", store=tmp_path, out=tmp_path))


def test_an_earlier_output_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "a.png"
    for content in (b"", b"\x89PNG ..."):
        target.write_bytes(content)
        require_replaceable(target, lambda start: start.startswith(b"\x89PNG"), "a PNG")
