"""Tasks by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hyfi_core.errors import RequestError
from pathology.predict.readout import Readout
from workflows.config.targets import SEVERAL
from workflows.tasks.several.task import Several
from workflows.tasks.single import single_task
from workflows.tasks.task import Task


def task_class(name: str) -> type[Task]:
    """Return the class of a task.

    Raises:
        RequestError: There is no such task.
    """
    return Several if name == SEVERAL else single_task(name)


def task_of(model: Mapping[str, Any]) -> Task:
    """Return the task of a ``model.json``; multiclass if it names none.

    Raises:
        RequestError: There is no such task, or it is not described.
    """
    try:
        task = task_class(str(model.get("task", "multiclass"))).of_json(model)
        own = model.get("own", {})
        return replace(task, own_loss=str(own.get("loss", "")), own_metrics=tuple(map(str, own.get("metrics", ()))))
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"the checkpoint's model.json does not describe its task: {error}") from error


def readout_of(model: Mapping[str, Any]) -> Readout:
    """Return how outputs of the model of a ``model.json`` are read.

    Raises:
        RequestError: As `task_of`.
    """
    return task_of(model).readout(model.get("calibration"))
