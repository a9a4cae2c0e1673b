"""Tasks of one target, by name."""

from __future__ import annotations

from hyfi_core.errors import RequestError
from workflows.config.tasks import TASKS
from workflows.tasks.multiclass import Multiclass
from workflows.tasks.multilabel.task import Multilabel
from workflows.tasks.ordinal.task import Ordinal
from workflows.tasks.own_task import own_task
from workflows.tasks.regression import Regression
from workflows.tasks.survival.task import Survival
from workflows.tasks.task import Task

SINGLE: dict[str, type[Task]] = {
    kind.facts.name: kind for kind in (Multiclass, Multilabel, Ordinal, Regression, Survival)
}
assert SINGLE.keys() == TASKS.keys()


def single_task(name: str) -> type[Task]:
    """Return the class of a task of one target, also of a user's own, ``package.module:class``.

    Raises:
        RequestError: There is no such task.
    """
    if ":" in name:
        return own_task(name)
    if name not in SINGLE:
        raise RequestError(f"the task is {name!r}; this version has: {', '.join(SINGLE)}")
    return SINGLE[name]
