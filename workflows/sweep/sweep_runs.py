"""The runs of a sweep, each setting in a folder of its own, and how validation chooses one.

::

    hyfi sweep                                        hyfi sweep --folds all
    RUN/setting-000/  best validation metric          RUN/setting-000/fold-0/ … fold-4/
    RUN/setting-001/  ◄── the best is chosen          RUN/setting-001/fold-0/ …
    RUN/sweep.csv     test is read by nobody          fold k: the setting with the best metric on its
                                                      validation fold; only that one is evaluated on k
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hyfi_core.errors import RequestError
from workflows.config.load import Config, load_config
from workflows.console import say
from workflows.cross_validation.fold_runs import FoldRuns, RunFamily
from workflows.launch.request import check_ranks, check_run, check_unused, is_finished
from workflows.paths import require_writable
from workflows.sweep.settings import SweptSetting
from workflows.training.best import best_step, merit
from workflows.training.metrics_log import read_metrics

TABLE_FILE = "sweep.csv"


@dataclass(frozen=True)
class SweepRuns(RunFamily):
    """The request of ``hyfi sweep``; its configuration does not include the settings.

    Attributes:
        settings: The settings, applied after the overrides.
        folds: The text of ``--folds``; None: one run for each setting.
        column: The column of the folds; None: ``fold``.
    """

    settings: tuple[SweptSetting, ...]
    folds: str | None = None
    column: str | None = None

    @property
    def metric(self) -> str:
        """The validation metric that chooses."""
        return self.config.validation.metric

    def folder_of(self, setting: SweptSetting) -> Path:
        """Return the folder of a setting."""
        return self.folder / setting.folder_name

    def overrides_of(self, setting: SweptSetting) -> list[str]:
        """Return the overrides of a setting's run."""
        own = f"run.dir={json.dumps(str(self.folder_of(setting)))}"
        return [*self.overrides, *setting.overrides, own]

    def config_of(self, setting: SweptSetting) -> Config:
        """Return the configuration of a setting's run."""
        try:
            return load_config(self.path, self.overrides_of(setting), ignore_plan=True)
        except RequestError as error:
            raise RequestError(f"setting {setting.describe()}: {error}") from error

    def fold_runs_of(self, setting: SweptSetting) -> FoldRuns:
        """Return the runs of a setting on all folds."""
        assert self.folds is not None
        overrides = tuple(self.overrides_of(setting))
        return FoldRuns(self.path, overrides, self.ranks, self.resumption, self.folds, self.column)

    def check(self) -> None:
        """Check, before the first run, everything that can be known; writes nothing.

        Raises:
            RequestError: A setting, a run or its slides cannot be used.
        """
        from workflows.training.checks.data_record import check_finished
        from workflows.training.job import prepare

        require_writable(self.folder / TABLE_FILE)
        if (self.folder / "config.yaml").exists():
            raise RequestError(f"run.dir {self.folder}: is a run of its own, not a sweep; use another run.dir")
        for setting in self.settings:
            config = self.config_of(setting)
            if self.folds is not None:
                self.fold_runs_of(setting).check()
                continue
            check_ranks(config, self.ranks if self.ranks is not None else config.ranks)
            check_unused(config)
            check_run(config, self.resumption)
            job = prepare(config)
            if not len(job.val):
                raise RequestError(f"a sweep chooses by {self.metric} of validation, and no slide is in its split")
            # Its score is compared with those of settings that are trained now.
            note = check_finished(job, self.resumption.accepts_changes) if is_finished(config) else None
            if note is not None:
                say(note)

    def train_words(self, setting: SweptSetting) -> list[str]:
        """Return the command that trains a setting."""
        goes_on = (self.folder_of(setting) / "config.yaml").exists()
        words = ["train", str(self.path), *self.overrides_of(setting)]
        words += [] if self.ranks is None else ["--ranks", str(self.ranks)]
        return [*words, *(self.resumption.words() if goes_on else [])]

    def score(self, run: Path) -> SettingScore:
        """Return the validation score of a run, at its best step."""
        lines = read_metrics(run / "metrics.jsonl")
        records = {record["step"]: record for record in lines if record["kind"] == "validation"}
        # Among all validated steps, also those whose checkpoints are removed: only the metric matters here.
        step = best_step(records, self.metric, records)
        if step is None:
            return SettingScore(run, None, None, (float("-inf"), float("-inf")))
        return SettingScore(run, step, records[step].get(self.metric), merit(records[step], self.metric))


@dataclass(frozen=True)
class SettingScore:
    """The validation score of a run.

    Attributes:
        run: Its folder.
        step: Step of its best checkpoint; None: it has none.
        value: The metric at this step; None: undefined.
        merit: Sort key, higher is better, see `workflows.training.best.merit`.
        given_up: Whether a search has stopped the run early; it is then not chosen.
    """

    run: Path
    step: int | None
    value: float | None
    merit: tuple[float, float]
    given_up: bool = False

    def describe(self, metric: str) -> str:
        """Return the deciding number as text: the metric, or the loss if the metric is undefined."""
        if self.value is not None:
            return f"{metric} {self.value:.4f}"
        if self.step is None:
            return "no checkpoint with a finite loss"
        return f"{metric} undefined, so by its loss, {-self.merit[1]:.4f}"


def chosen_of(scores: Sequence[SettingScore]) -> int:
    """Return the index of the best score, the first of equals."""
    # A run that was given up early has a score of another step, and cannot be compared.
    return max(range(len(scores)), key=lambda k: (not scores[k].given_up, scores[k].merit, -k))
