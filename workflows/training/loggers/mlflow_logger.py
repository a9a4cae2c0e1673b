"""MLflow: the store that MLFLOW_TRACKING_URI names, else a SQLite file in the run's folder."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from typing import Any

from workflows.training.loggers.record import LoggedRecord, MetricsLogger, RunOutcome

_MOST_AT_ONCE = 1000
"""Largest number of metrics in one call of MLflow."""
# Limits of MLflow's REST API for one call, and for the length of a parameter.
_MOST_PARAMS = 100
_LONGEST = 500
_STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowLogger(MetricsLogger):
    """The run as a run of MLflow."""

    name = "mlflow"

    def begin(self) -> str:
        """Open the run in the experiment MLFLOW_EXPERIMENT_NAME, by default ``hyfi``; return its id."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        # alembic reports each migration of a new database.
        for noisy in ("mlflow", "alembic"):  # after the import, which sets its own levels
            logging.getLogger(noisy).setLevel(logging.WARNING)
        own = self.folder / "mlflow"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            own.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{(own / 'mlflow.db').resolve()}"
        # A client, not `mlflow.start_run`: that keeps an active run for the process, which other code may use.
        self._client: Any = MlflowClient(tracking_uri=uri)
        if self.identity is not None:
            # It was closed when the earlier process ended.
            self._client.update_run(self.identity, status="RUNNING")
            return self.identity
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "hyfi"
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self.identity = str(self._client.create_run(number, run_name=self.folder.name).info.run_id)
        # Parameters are logged for new runs only: MLflow refuses to change one.
        params = [Param(key, str(value)[:_LONGEST]) for key, value in self.settings.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self.identity, params=params[first : first + _MOST_PARAMS])
        return self.identity

    def write(self, records: Sequence[LoggedRecord]) -> None:
        """Record numbers, in as few calls as possible."""
        from mlflow.entities import Metric

        metrics = [
            # MLflow takes no other characters in names; times are in milliseconds.
            Metric(re.sub(r"[^\w\-./: ]", "_", name), value, int(1000 * record.time_s), record.step)
            for record in records
            for name, value in record.values.items()
        ]
        for first in range(0, len(metrics), _MOST_AT_ONCE):
            self._client.log_batch(self.identity, metrics=metrics[first : first + _MOST_AT_ONCE])

    def end(self, outcome: RunOutcome) -> None:
        """Record paths as tags, and end the run."""
        for name, path in outcome.files.items():
            self._client.set_tag(self.identity, name, str(path))
        if outcome.best_step is not None:
            self._client.set_tag(self.identity, "best_step", str(outcome.best_step))
        # Last, so that a reader who sees the run as ended sees everything.
        self._client.set_terminated(self.identity, _STATUS[outcome.state])
