"""The command line and what it runs: commands, configuration, training, evaluation, launchers.

From Python, `train_model` trains as ``hyfi train`` does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["TrainedRun", "train_model"]


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended.

    Attributes:
        folder: Its ``run.dir``.
        checkpoint: The best checkpoint, or the latest if nothing was validated; `pathology.predict_slides` takes it.
        records: Its ``metrics.jsonl``: a dict for each step and each validation.
        stopped: Whether it was stopped on request; ``resume=True`` continues it.
    """

    folder: Path
    checkpoint: Path
    records: tuple[dict[str, Any], ...]
    stopped: bool

    @property
    def validations(self) -> tuple[dict[str, Any], ...]:
        """The records of validations."""
        return tuple(one for one in self.records if one["kind"] == "validation")


def train_model(
    settings: Mapping[str, Any] | str | os.PathLike[str],
    *overrides: str,
    ranks: int | None = None,
    resume: bool = False,
) -> TrainedRun:
    """Train a classifier, as ``hyfi train`` does: in this process, or on ranks that it starts.

    Args:
        settings: The sections of a run's YAML as a dict, ``{"data": {"store": …}, …}``, paths as texts or as
            `pathlib.Path`, or the file.
        overrides: ``section.key=value``.
        ranks: Number of ranks; None: as many as the run needs.
        resume: Whether a run that was stopped is continued.

    Raises:
        RequestError: The settings are wrong; nothing is written.
        RuntimeError: A rank has failed; its log is in the run's folder.
    """
    import subprocess
    import sys
    import tempfile

    import yaml

    from hyfi_core.errors import RequestError
    from workflows.config.load import load_config
    from workflows.console import plain_json
    from workflows.exit_codes import DONE, STOPPED, WRONG_REQUEST
    from workflows.training.metrics_log import read_metrics

    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "run.yaml" if isinstance(settings, Mapping) else Path(settings)
        if isinstance(settings, Mapping):
            path.write_text(yaml.safe_dump(plain_json(settings)), encoding="utf-8")
        try:
            folder = load_config(path, overrides, ignore_plan=True).run.dir
        except RequestError as error:
            raise RequestError(str(error).replace(f"{temporary}/run.yaml", "settings")) from None
        words = ["train", str(path), *overrides, *(["--ranks", str(ranks)] if ranks else []), *["--resume"] * resume]
        # In a process of its own, which a failing rank ends, not the notebook.
        done = subprocess.run([sys.executable, "-m", "workflows.cli", *words], stderr=subprocess.PIPE, text=True)
    if done.returncode == WRONG_REQUEST:
        raise RequestError(done.stderr.strip().removeprefix("hyfi: "))
    if done.returncode not in (DONE, STOPPED):
        raise RuntimeError(f"hyfi train ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    checkpoints = folder / "checkpoints"
    best = checkpoints / ("best" if (checkpoints / "best").exists() else "latest")
    return TrainedRun(folder, best, tuple(read_metrics(folder / "metrics.jsonl")), done.returncode == STOPPED)
