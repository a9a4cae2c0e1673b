"""Tasks of the user, named ``package.module:class`` in a configuration: classes derived from `Task` or from a task."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from data.samples.labels import Target
from hyfi_core.errors import RequestError
from hyfi_core.user_code import load_user_code
from workflows.config.targets import facts_of
from workflows.tasks.own import without_parameters
from workflows.tasks.task import Task

KEY = "data.task"
_DRAWS = 3
Value = TypeVar("Value")


def own_task(name: str) -> type[Task]:
    """Return the class of a user's task.

    Raises:
        RequestError: It cannot be imported, is no class derived from `Task`, has no facts, or lacks methods.
    """
    kind = load_user_code(KEY, name, "a class of a task")
    if not (inspect.isclass(kind) and issubclass(kind, Task)):
        raise RequestError(f"{KEY} {name!r}: is no class derived from workflows.tasks.task.Task, or from a task")
    facts_of(name)
    if inspect.isabstract(kind):
        raise RequestError(
            f"{KEY} {name!r}: lacks {', '.join(sorted(kind.__abstractmethods__))}, see workflows/tasks/task.py"
        )
    return kind


def name_of(task: Task) -> str:
    """Return the name of a task as in ``data.task``."""
    kind = type(task)
    return f"{kind.__module__}:{kind.__qualname__}" if is_own(task) else task.facts.name


def is_own(task: Task) -> bool:
    """Whether a task is the user's."""
    return not type(task).__module__.startswith("workflows.tasks.")


def try_task(task: Task, targets: Sequence[Target]) -> None:
    """Call the methods of a user's task with random outputs of a few slides: mistakes show before a run, not during it.

    Args:
        task: The task.
        targets: Labels of the slides, two or more.

    Raises:
        RequestError: A method fails, or does not return what `Task` describes; the message names the method.
    """
    name = name_of(task)
    outputs = torch.randn(len(targets), task.outputs, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = _tried(name, "tensor", lambda: task.tensor(targets))
    if not isinstance(labels, torch.Tensor) or len(labels) != len(targets):
        raise RequestError(f"{KEY} {name!r}: tensor must return a tensor with a row for each of {len(targets)} labels")
    # Weights of the loss would not be trained.
    with without_parameters():
        loss = _tried(name, "loss", lambda: task.loss(outputs, labels))
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
        raise RequestError(f"{KEY} {name!r}: loss must return a scalar tensor, computed from the outputs")
    values, counts = outputs.detach().double(), torch.ones(_DRAWS, len(targets), dtype=torch.float64)
    drawn = _tried(name, "drawn", lambda: task.drawn(values, labels, counts))
    wrong = [metric for metric in task.metric_names if metric not in drawn or drawn[metric].shape != (_DRAWS,)]
    if wrong:
        raise RequestError(f"{KEY} {name!r}: drawn must return {', '.join(wrong)}, each (draws,) = ({_DRAWS},)")
    of_case = torch.zeros(len(targets), dtype=torch.long)  # all slides are of one case
    merged, merged_labels = _tried(name, "by_case", lambda: task.by_case(values, labels, of_case, "mean"))
    if merged.shape != (1, task.outputs) or len(merged_labels) != 1:
        raise RequestError(f"{KEY} {name!r}: by_case must return outputs (cases, {task.outputs}) and their labels")
    described = _tried(name, "to_json", lambda: json.loads(json.dumps(task.to_json())))
    model = {"task": name, "target": list(task.columns), **described}
    rebuilt = _tried(name, "of_json", lambda: type(task).of_json(model))
    if rebuilt.to_json() != task.to_json():
        raise RequestError(f"{KEY} {name!r}: of_json must return the task that to_json describes")
    _tried(name, "text", lambda: [task.target_of(task.text(target)) for target in targets])
    _try_readout(name, task, values[0].numpy())


def _try_readout(name: str, task: Task, outputs: np.ndarray) -> None:
    """Refuse a readout whose methods return other shapes than they must."""
    readout = _tried(name, "readout", lambda: task.readout(None))
    if len(readout.channels) != task.outputs:
        raise RequestError(f"{KEY} {name!r}: readout has {len(readout.channels)} channels for {task.outputs} outputs")
    values = _tried(name, "readout.values", lambda: readout.values(outputs))
    if np.shape(values) != (len(readout.columns),):
        raise RequestError(
            f"{KEY} {name!r}: readout.values must return a number for each of {len(readout.columns)} columns"
        )
    if not isinstance(_tried(name, "readout.prediction", lambda: readout.prediction(values)), str):
        raise RequestError(f"{KEY} {name!r}: readout.prediction must return a text")
    scores = _tried(name, "readout.position_scores", lambda: readout.position_scores(torch.zeros(task.outputs, 2, 3)))
    if scores.shape != (task.outputs, 2, 3):
        raise RequestError(f"{KEY} {name!r}: readout.position_scores must return ({task.outputs}, h, w)")


def _tried(name: str, method: str, call: Callable[[], Value]) -> Value:
    """Return what ``call`` returns; refuse a task whose ``method`` fails in it."""
    try:
        return call()
    except Exception as error:
        raise RequestError(f"{KEY} {name!r}: {method} fails: {type(error).__name__}: {error}") from error
