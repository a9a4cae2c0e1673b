"""The runs of a cross-validation, each in a folder of its own, and the checks before the first run.

::

    RUN/splits.csv ─► hyfi train … run.dir=RUN/fold-0 ─► hyfi validate RUN/fold-0/checkpoints/best ─► RUN/fold-0/test/
                      hyfi train … run.dir=RUN/fold-1 ─► …                                            RUN/fold-1/test/
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data.csv_table import read_own
from data.files import write_atomically
from data.location import location
from data.store.manifest import load_manifest
from hyfi_core.errors import RequestError
from hyfi_core.runtime.launch import inside_launcher
from workflows.config.load import Config, load_config
from workflows.console import say
from workflows.cross_validation.fold_table import COLUMN, FoldTable, column_of
from workflows.launch.request import check_ranks, check_run, check_unused, is_finished
from workflows.launch.resumption import Resumption
from workflows.paths import require_writable

SPLITS_FILE = "splits.csv"
TEST_FOLDER = "test"


@dataclass(frozen=True)
class RunFamily:
    """Several runs of one YAML, in one folder.

    Attributes:
        path: The YAML of every run.
        overrides: ``section.key=value``, applied to it.
        ranks: Number of ranks of each run; None: as many as it needs.
        resumption: Whether runs are continued.
    """

    path: Path
    overrides: tuple[str, ...]
    ranks: int | None
    resumption: Resumption

    @cached_property
    def config(self) -> Config:
        """The configuration of all runs, whose ``run.dir`` is their folder."""
        return load_config(self.path, self.overrides, ignore_plan=True)

    @property
    def folder(self) -> Path:
        """The folder of all runs."""
        return self.config.run.dir


@dataclass(frozen=True)
class FoldRuns(RunFamily):
    """The request of ``hyfi train CONFIG --folds …``.

    Attributes:
        folds: The text of ``--folds``.
        column: The column of the folds; None: ``fold``.
    """

    folds: str
    column: str | None = None

    @cached_property
    def table(self) -> FoldTable:
        """The folds of the slides.

        Raises:
            RequestError: The splits have none.
        """
        data = self.config.data
        path = data.splits or data.labels or data.store / "manifest.csv"
        return FoldTable.read(location(path), self._slides, data.missing_words, self.column or COLUMN)

    @cached_property
    def _slides(self) -> list[dict[str, str]]:
        """The rows of the store's manifest."""
        return load_manifest(location(self.config.data.store))

    @cached_property
    def chosen_folds(self) -> tuple[int, ...]:
        """The folds to run."""
        return self.table.chosen(self.folds)

    def run_of(self, fold: int) -> Path:
        """Return the folder of a fold's run."""
        return self.folder / f"fold-{fold}"

    def overrides_of(self, fold: int, splits: Path | None = None) -> list[str]:
        """Return the overrides of a fold's run; ``splits``: the CSV to read instead of the one in the folder."""
        own = {
            "data.splits": str(splits or self.folder / SPLITS_FILE),
            "data.split_column": column_of(fold),
            "run.dir": str(self.run_of(fold)),
        }
        return [*self.overrides, *(f"{key}={json.dumps(value)}" for key, value in own.items())]

    def config_of(self, fold: int, splits: Path | None = None) -> Config:
        """Return the configuration of a fold's run."""
        return load_config(self.path, self.overrides_of(fold, splits), ignore_plan=True)

    def check(self) -> None:
        """Check, before the first run, everything that can be known; writes nothing.

        Raises:
            RequestError: The folds, a fold's run or its slides cannot be used.
        """
        if inside_launcher() is not None:
            raise RequestError(
                "--folds: starts the ranks of each fold itself, but was started by a launcher; call `hyfi train … "
                "--folds` without a launcher, or start each fold as a run of its own: data.split_column and run.dir"
            )
        if self.resumption.source is not None:
            raise RequestError(
                f"--folds with --resume-from {self.resumption.source}: a fold continues from its latest checkpoint; "
                "give --resume"
            )
        check_ranks(self.config, self.ranks if self.ranks is not None else self.config.ranks)
        chosen_folds = self.chosen_folds
        self._check_folder()
        # All folds before the first: a run of days must not end because of the last one's settings.
        for fold in chosen_folds:
            config = self.config_of(fold)
            check_unused(config)
            check_run(config, self.resumption)
        self._check_slides()

    def _check_folder(self) -> None:
        """Refuse a folder that has something else, or the splits of other folds."""
        require_writable(self.folder / SPLITS_FILE)
        if (self.folder / "config.yaml").exists():
            raise RequestError(f"run.dir {self.folder}: is a run of its own, not one of folds; use another run.dir")
        if not self.folder.exists() or not any(self.folder.iterdir()):
            return
        splits = self.folder / SPLITS_FILE
        if not splits.is_file():
            raise RequestError(f"run.dir {self.folder}: exists and has no {SPLITS_FILE} of folds; use another run.dir")
        # Byte by byte: a slide that has moved to another fold would be tested by a model that was trained on it.
        if splits.read_bytes() != self.table.splits():
            raise RequestError(
                f"{splits}: the folds differ from those of {self.table.table.name}; restore them, or use another "
                "run.dir"
            )

    def _check_slides(self) -> None:
        """Check labels and slides of every fold as its run would, with splits that are not in the folder yet.

        Finished folds are compared, too, as their models are reported together with those of the others.
        """
        from workflows.training.checks.data_record import check_finished
        from workflows.training.job import prepare

        with tempfile.TemporaryDirectory() as folder:
            # In a folder of their own: `check` writes nothing into the runs.
            splits = Path(folder) / SPLITS_FILE
            splits.write_bytes(self.table.splits())
            for fold in self.table.folds:
                trained = self.is_trained(fold)
                if fold not in self.chosen_folds and not trained:
                    continue
                try:
                    job = prepare(self.config_of(fold, splits))
                    note = check_finished(job, self.resumption.accepts_changes) if trained else None
                except RequestError as error:
                    # The user knows the table, not the temporary file.
                    text = str(error).replace(str(splits), self.table.table.name)
                    raise RequestError(f"fold {fold}: {text}") from error
                if note is not None:
                    say(f"fold {fold}: {note}")

    def write_splits(self) -> None:
        """Write the splits of all folds."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / SPLITS_FILE, self.table.splits())

    def is_trained(self, fold: int) -> bool:
        """Whether a fold's run is done, and its configuration does not make it longer."""
        return is_finished(self.config_of(fold))

    def checkpoint_of(self, fold: int) -> Path:
        """Return the checkpoint that is reported: the best one, or the latest if validation chose none."""
        checkpoints = self.run_of(fold) / "checkpoints"
        return checkpoints / ("best" if (checkpoints / "best").exists() else "latest")

    def test_of(self, fold: int) -> Path:
        """Return the folder with the predictions of a fold's model for its test slides."""
        return self.run_of(fold) / TEST_FOLDER

    def is_evaluated(self, fold: int) -> bool:
        """Whether the fold's present checkpoint was evaluated; training may have replaced an evaluated one."""
        from hyfi_core.runtime.checkpoint import read_model_json
        from pathology.predict.table import FILE_NAME

        if not (self.test_of(fold) / FILE_NAME).is_file():
            return False
        try:
            metrics = json.loads((self.test_of(fold) / "metrics.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        # Compared by the step: training that was made longer may have chosen another checkpoint.
        return bool(metrics.get("step") == read_model_json(self.checkpoint_of(fold)).get("step"))

    @cached_property
    def _labels(self) -> Mapping[str, str]:
        """The present label of each slide as text, empty if there is none.

        Slides that are not used, as for their flags, are left out.
        """
        from workflows.training.job import prepare

        labels: dict[str, str] = {}
        # Two folds have all slides: the test slides of the first are used by the second.
        for fold in self.table.folds[:2]:
            # A fold that was not asked for may be impossible, as without a class in training.
            with suppress(RequestError):
                job = prepare(self.config_of(fold))
                slides = (*job.train.samples, *job.val.samples)
                labels |= {slide.slide_id: job.task.text(slide.label) for slide in slides if slide.label is not None}
                labels |= dict.fromkeys(job.labels.unlabelled, "")
        return labels

    def was_relabelled(self, fold: int) -> bool:
        """Whether a test slide of the fold has another label than the one with which it was evaluated, or none."""
        from pathology.predict.table import FILE_NAME

        _, rows = read_own((self.test_of(fold) / FILE_NAME).read_bytes())
        evaluated = {row["slide_id"]: row["label"] for row in rows}
        added = {slide for slide in self._tested(fold) if self._labels.get(slide)} - evaluated.keys()
        return bool(added) or any(label != self._labels.get(slide, label) for slide, label in evaluated.items())

    def _tested(self, fold: int) -> list[str]:
        """Return the test slides of a fold, labelled or not."""
        from data.samples.splits import load_splits

        data, splits = self.config.data, self.folder / SPLITS_FILE
        # Where the checks before a run found a fault, they have named it.
        with suppress(RequestError):
            split_of = load_splits(
                splits,
                self._slides,
                column=column_of(fold),
                merge_alike=data.merge_alike,
                missing=data.missing_words,
            )
            return [slide for slide, split in split_of.items() if split == "test"]
        return []

    def train_words(self, fold: int) -> list[str]:
        """Return the command that trains a fold."""
        # --resume only where there is a run: the others start.
        goes_on = (self.run_of(fold) / "config.yaml").exists()
        words = ["train", str(self.path), *self.overrides_of(fold)]
        words += [] if self.ranks is None else ["--ranks", str(self.ranks)]
        return [*words, *(self.resumption.words() if goes_on else [])]

    def validate_words(self, fold: int) -> list[str]:
        """Return the command that evaluates a fold's model on its test slides."""
        config, plan = self.config, self.config.plan
        words = ["validate", str(self.checkpoint_of(fold)), "--store", str(config.data.store), "--split", "test"]
        words += ["--splits", str(self.folder / SPLITS_FILE), "--out", str(self.test_of(fold))]
        words += ["--labels", str(config.data.labels)] if config.data.labels else []
        words += ["--device", config.run.device]
        words += ["--features", str(config.data.features)] if config.data.features else []
        if plan.cells is not None and config.data.kind == "images":
            words += ["--cells", plan.cells if plan.cells == "auto" else ",".join(map(str, plan.cells))]
            words += ["--memory", str(plan.memory_bytes)] if plan.memory_bytes and plan.spill else []
            words += ["--spill", plan.spill] if plan.spill else []
        # Validation has no replicas: one image after the other, or bags that ranks share.
        ranks = plan.ranks // plan.replicas
        return words + (["--ranks", str(ranks)] if ranks > 1 else [])
