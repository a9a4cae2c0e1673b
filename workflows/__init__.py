"""The command line and what it runs: commands, configuration, training, evaluation, launchers.

From Python, `train_model` trains as ``hyfi train`` does, and `predict_slides` predicts as ``hyfi predict`` does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathology.predict.table import PredictionReport
    from pathology.scripts import Slides, StrPath

__all__ = ["TrainedRun", "predict_slides", "train_model"]


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

    def __repr__(self) -> str:
        """Return folder, checkpoint and the number of steps and validations, in a line."""
        validations = len(self.validations)
        steps, ended = len(self.records) - validations, ", stopped on request" if self.stopped else ""
        recorded = f"{steps} steps and {validations} validations recorded"
        return f"<TrainedRun {self.folder}: {recorded}, {self.checkpoint}{ended}>"

    @property
    def validations(self) -> tuple[dict[str, Any], ...]:
        """The records of validations."""
        return tuple(record for record in self.records if record["kind"] == "validation")


def train_model(
    settings: Mapping[str, Any] | str | os.PathLike[str],
    *overrides: str,
    ranks: int | None = None,
    resume: bool = False,
) -> TrainedRun:
    """Train a classifier as ``hyfi train`` does, in a process of its own; return when the run has ended.

    Args:
        settings: The path of a run's YAML, or its sections as a dict, ``{"data": {"store": …}, …}``, with paths as
            `str` or `pathlib.Path`.
        overrides: ``section.key=value``, applied to the settings.
        ranks: Number of ranks; None: as many as the run needs.
        resume: Whether to continue a stopped run; without one, a new run starts.

    Raises:
        RequestError: The settings are wrong; nothing is written.
        RuntimeError: The run failed; the logs of its ranks are in its folder.
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
            # As a file, because the run starts ranks, which read it.
            path.write_text(yaml.safe_dump(plain_json(settings)), encoding="utf-8")
        try:
            folder = load_config(path, overrides, ignore_plan=True).run.dir
        except RequestError as error:
            # The temporary file means nothing to the caller.
            raise RequestError(str(error).replace(f"{temporary}/run.yaml", "settings")) from None
        words = ["train", str(path), *overrides]
        words += ["--ranks", str(ranks)] if ranks else []
        words += ["--resume"] if resume else []
        # In another process, because a failing rank ends its process, which must not be the notebook's.
        completed = subprocess.run([sys.executable, "-m", "workflows.cli", *words], stderr=subprocess.PIPE, text=True)
    code = completed.returncode
    if code == WRONG_REQUEST:
        raise RequestError(completed.stderr.strip().removeprefix("hyfi: "))
    if code not in (DONE, STOPPED):
        raise RuntimeError(f"hyfi train ended with exit code {code}:\n{completed.stderr[-4000:]}")
    best, latest = folder / "checkpoints" / "best", folder / "checkpoints" / "latest"
    records = tuple(read_metrics(folder / "metrics.jsonl"))
    return TrainedRun(folder, best if best.exists() else latest, records, stopped=code == STOPPED)


def predict_slides(
    checkpoints: StrPath | Sequence[StrPath],
    slides: Slides,
    out: StrPath,
    *,
    labels: StrPath | None = None,
    target: str | None = None,
    id_column: str | None = None,
    split: str | None = None,
    **options: Any,
) -> PredictionReport:
    """Predict slides in this process, as ``hyfi predict`` does: models of every task, of images, tiles and features.

    Args:
        checkpoints: A checkpoint, such as ``TrainedRun.checkpoint``; several form an ensemble.
        slides: Slide files, folders, manifest CSVs, stores, or opened slides; one or several.
        out: The folder of results, with a page of all slides.
        labels: A CSV of the slides' labels.
        target: Column of the labels to compare with; None: as in training.
        id_column: Column of the labels with the names of slides; None: as in training.
        split: Predict only slides of this split.
        options: Options of ``hyfi predict``: ``features=…``, ``evidence="gradient"``, ``memory="8GB"``,
            ``cells="4,4"``, ``device="cpu"``, ``overwrite=True`` …

    Returns:
        The predictions that are done, those that are incomplete, and those that failed, each with its reason.

    Raises:
        RequestError: A checkpoint, an input, an option or ``out`` cannot be used; nothing was written.
    """
    from dataclasses import fields

    from hyfi_core.errors import RequestError
    from pathology.predict.options import PredictOptions
    from pathology.scripts import several
    from workflows.commands.predict import PredictArguments, predicted

    # These are texts in `PredictArguments`, which turns them into fields of `PredictOptions`.
    as_texts = {name: options.pop(name) for name in ("cells", "memory", "device") if name in options}
    names = [field.name for field in fields(PredictOptions) if field.name != "memory_bytes"]
    unknown = [name for name in options if name not in names]
    if unknown:
        raise RequestError(f"there is no option {unknown[0]!r}; the options are {', '.join((*names, 'memory'))}")
    if options.get("features") is not None:
        options["features"] = Path(options["features"])
    arguments = PredictArguments(
        checkpoints=several(checkpoints),
        inputs=several(slides),
        out=Path(out),
        labels=None if labels is None else Path(labels),
        target=target,
        id_column=id_column,
        split=split,
        ranks_per_slide=options.pop("ranks_per_slide", None),
        options=options,
        **as_texts,
    )
    return predicted(arguments.request())
