"""A search for settings by Optuna, which proposes each setting from the validation metrics of earlier ones.

::

    trial n    sampler seeded by (seed, n) ─▶ setting n ─▶ run ─▶ metric of validation ─▶ RUN/optuna.journal
                        ▲ results of trials 0 … n − 1, from the journal

Everything that decides is in the journal, so a stopped search continues as if it had not been stopped.
Sampler: TPE, Bergstra et al., Algorithms for Hyper-Parameter Optimization, NeurIPS 2011; the first ten are random.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data.samples.keyed import keyed_uniforms
from hyfi_core.errors import RequestError
from workflows.sweep.settings import SweptSetting, range_ends, read_settings, read_space, rounded

JOURNAL_FILE = "optuna.journal"
_IDENTITY, _GIVEN_UP = "hyfi", "given_up"
"""Names of attributes in the journal: what a search depends on, and that a trial is to be given up."""
_JUDGED_AFTER = 4
"""Number of trials that must have ended before one may be given up."""


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search.

    Attributes:
        space: Keys with their values or ranges, as `read_space` returns them.
        trials: Number of settings; with folds, for each fold.
        seed: Seed of the proposals.
        prune: Whether to give up settings whose validation is worse than the median of earlier ones at the same step.
    """

    space: Mapping[str, Any]
    trials: int
    seed: int
    prune: bool = False


def requested_settings(
    path: Path, search: str | None, trials: int | None, seed: int, prune: bool
) -> tuple[tuple[SweptSetting, ...], SearchOptions | None]:
    """Return (settings, None) or ((), options of a search), by the options of ``hyfi sweep``.

    Args:
        path: The YAML of settings.
        search: ``grid``, ``random``, ``optuna``; None: ``random`` with ``trials``, else ``grid``.
        trials: Number of random or searched settings; None: every combination.
        seed: Seed of random or searched settings.
        prune: Whether settings may be given up.

    Raises:
        RequestError: The options do not fit, or the YAML is wrong.
    """
    if search not in (None, "grid", "random", "optuna"):
        raise RequestError(f"--search {search}: expected grid, random or optuna")
    if prune and search != "optuna":
        raise RequestError("--prune is for --search optuna, which knows the earlier settings")
    if search in ("random", "optuna") and trials is None:
        raise RequestError(f"--search {search} needs --trials N, the number of settings")
    if search == "grid" and trials is not None:
        raise RequestError("--search grid trains every combination; leave out --trials, or use --search random")
    if search != "optuna" or trials is None:
        return tuple(read_settings(path, trials, seed)), None
    return (), SearchOptions(read_space(path, ranges=True), trials, seed, prune)


def require_optuna() -> None:
    """Check that Optuna is installed.

    Raises:
        RequestError: It is not.
    """
    if find_spec("optuna") is None:
        raise RequestError("--search optuna needs optuna: pip install 'hyfi[sweep]'")


class OptunaSearch:
    """The search of one split or of one fold; a trial is a setting.

    Args:
        folder: Folder of the sweep.
        options: Options of the search.
        identity: What else must be the same when a search continues: the metric, the length of a run.
        fold: The fold; None without folds.

    Raises:
        RequestError: The journal has a search with other options.
    """

    def __init__(
        self, folder: Path, options: SearchOptions, identity: Mapping[str, Any], fold: int | None = None
    ) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        # Optuna would print a line for each trial, beside ours.
        logging.getLogger("optuna").setLevel(logging.WARNING)
        self._optuna: Any = optuna
        self._options, self._fold = options, fold
        path = folder / JOURNAL_FILE
        pruner = optuna.pruners.MedianPruner(n_startup_trials=_JUDGED_AFTER) if options.prune else None
        self._study: Any = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(path))),
            study_name="split" if fold is None else f"fold-{fold}",
            direction="maximize",
            pruner=pruner or optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        self._check_identity(
            path,
            {**identity, "settings": dict(options.space), "--seed": options.seed, "--prune": options.prune},
        )

    def _check_identity(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Write what a new search depends on into the journal; refuse to continue a search with other values."""
        stored = self._study.user_attrs.get(_IDENTITY)
        if stored is None:
            self._study.set_user_attr(_IDENTITY, dict(identity))
            return
        # Compared as JSON, which the journal is: its lists may have been tuples.
        changed = [key for key in identity if json.loads(json.dumps(identity[key])) != stored.get(key)]
        if changed:
            raise RequestError(
                f"{path}: the search has another {' and '.join(changed)}; give what it had, or another run.dir"
            )

    def setting(self, number: int) -> SweptSetting:
        """Return the setting of trial ``number``; the first number that is not in the journal proposes a new one."""
        trials = self._study.get_trials(deepcopy=False)
        # A search that continues asks again for the trials in the journal, and gets the same settings.
        if number == len(trials):
            [uniform] = keyed_uniforms(
                1, "optuna", self._options.seed, -1 if self._fold is None else self._fold, number
            )
            # A new sampler for each trial: the state of one would not be in the journal.
            self._study.sampler = self._optuna.samplers.TPESampler(seed=int(uniform * 2**32))
            self._study.ask(self._distributions())
            trials = self._study.get_trials(deepcopy=False)
        params = trials[number].params
        values = {
            # Values to choose from are JSON texts in the journal: they may be lists, which Optuna does not take.
            key: json.loads(params[key]) if isinstance(values, list) else rounded(params[key])
            for key, values in self._options.space.items()
        }
        return SweptSetting(number, values, self._fold)

    def _distributions(self) -> dict[str, Any]:
        """Return key -> Optuna's distribution of its values."""
        kinds = self._optuna.distributions
        return {
            key: kinds.CategoricalDistribution(tuple(json.dumps(value) for value in values))
            if isinstance(values, list)
            else kinds.FloatDistribution(*range_ends(values), log=bool(values.get("log")))
            for key, values in self._options.space.items()
        }

    def is_over(self, number: int) -> bool:
        """Whether a trial has ended, with or without a result."""
        return bool(self._study.get_trials(deepcopy=False)[number].state.is_finished())

    def was_given_up(self, number: int) -> bool:
        """Whether a trial was pruned."""
        return bool(self._study.get_trials(deepcopy=False)[number].state == self._optuna.trial.TrialState.PRUNED)

    def gives_up(self, number: int, values: Sequence[tuple[int, float]]) -> bool:
        """Whether to give up a trial by its (step, value) so far; the first value that Optuna would prune decides.

        The decision is final, although the run may validate again before it has stopped.
        """
        if not self._options.prune:
            return False
        so_far = self._study.get_trials(deepcopy=False)[number]
        if so_far.user_attrs.get(_GIVEN_UP):
            return True
        trial = self._optuna.trial.Trial(self._study, so_far._trial_id)
        for step, value in values:
            # Optuna ignores a step that is reported twice, with a warning; a resumed search sees all records again.
            if step not in so_far.intermediate_values:
                trial.report(value, step)
                if trial.should_prune():
                    trial.set_user_attr(_GIVEN_UP, True)
                    return True
        return False

    def tell(self, number: int, value: float | None, given_up: bool = False) -> None:
        """Record the end of a trial.

        Args:
            number: Number of the trial.
            value: Its metric, higher is better; None: undefined, or the trial failed.
            given_up: Whether it was stopped early; its value then does not count.
        """
        states = self._optuna.trial.TrialState
        if given_up:
            self._study.tell(number, state=states.PRUNED)
        elif value is None:
            self._study.tell(number, state=states.FAIL)
        else:
            self._study.tell(number, value)
