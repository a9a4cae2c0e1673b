"""What is predicted: the keys of one target, and of each of several."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from hyfi_core.errors import RequestError
from workflows.config.section import OWN, AboveZero, Section
from workflows.config.tasks import TASKS, TaskFacts

Column = Annotated[str, Field(min_length=1)]
SEVERAL = "several"
"""Name of the task of several targets, in a ``model.json``."""


def _about() -> list[str]:
    """Return ``name – what a slide's label is`` for each task."""
    return [f"{name} – {facts.about}" for name, facts in TASKS.items()]


def _losses() -> list[str]:
    return [f"{', '.join(facts.losses)} ({name})" for name, facts in TASKS.items()]


def _task(name: str) -> str:
    """Return the name of a task; refuse one that is neither built in nor a class of the user."""
    if name not in TASKS and not re.fullmatch(OWN, name):
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"given {name!r}{hint}; allowed: {', '.join(TASKS)}, or package.module:class")
    return name


TaskName = Annotated[str, AfterValidator(_task)]


def facts_of(task: str) -> TaskFacts:
    """Return the facts of a task, which may be a class of the user.

    Raises:
        RequestError: The user's class cannot be imported, or has no facts.
    """
    if task in TASKS:
        return TASKS[task]
    from hyfi_core.user_code import load_user_code

    facts = getattr(load_user_code("data.task", task, "a class of a task"), "facts", None)
    if not isinstance(facts, TaskFacts):
        raise RequestError(
            f"data.task {task!r}: has no facts; it must be a class derived from workflows.tasks.task.Task (or from a "
            "task, such as workflows.tasks.regression.Regression), with facts: workflows.config.tasks.TaskFacts"
        )
    return facts


class TargetKeys(Section):
    """What is predicted of a slide, and by which loss it is learnt."""

    target: Column | tuple[Column, ...] = Field(
        "label",
        min_length=1,
        description="a column of the labels, or a list of columns: what is predicted; slides with an empty cell, or "
        "one of the missing words, are not used",
    )
    task: TaskName = Field(
        "multiclass",
        description=f"{', '.join(TASKS)}, or package.module:class: what is predicted; {'; '.join(_about())}; or a task "
        "of your own (docs/tasks.md)",
    )
    loss: str | None = Field(
        None,
        description=f"{'; '.join(_losses())}; or package.module:function: the loss; one of your own is a function of "
        "(outputs, labels) of the whole batch; default: the first of the task",
    )
    time_bins: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="a whole number ≥ 2: intervals of time of loss hazards, which end at quantiles of the event times "
        "of training; default: 4",
    )
    class_weights: Literal["none", "balanced"] = Field(
        "none",
        description="none or balanced: weights of the classes in the loss; balanced: inversely proportional "
        "to their frequency",
    )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the target."""
        return _columns_of(self.target)

    @property
    def facts(self) -> TaskFacts:
        """The facts of the task."""
        return facts_of(self.task)

    @property
    def named_loss(self) -> str:
        """The task's loss that the user chose; the task's default if the user gave no loss or one of their own."""
        return self.loss if self.loss in self.facts.losses else self.facts.losses[0]

    @property
    def own_loss(self) -> str:
        """``package.module:function`` of the user's own loss; empty: none."""
        return self.loss if self.loss is not None and re.fullmatch(OWN, self.loss) else ""

    @model_validator(mode="after")
    def _fits_its_task(self) -> TargetKeys:
        """Refuse keys that do not go with the task."""
        facts, columns = facts_of(self.task), _columns_of(self.target)
        count = len(columns)
        fewest, most = facts.columns
        if not fewest <= count <= most:
            needed = f"{fewest}" if fewest == most else f"{fewest} or more"
            raise ValueError(
                f"target: given {self.target!r}; task {self.task} needs {needed} column{'s' * (needed != '1')} "
                f"({facts.about})"
            )
        if len(set(columns)) < count:
            raise ValueError(f"target: given {list(columns)}; each column only once")
        if self.loss is not None and self.loss not in facts.losses and not self.own_loss:
            raise ValueError(
                f"loss: given {self.loss!r}; allowed for task {self.task}: {', '.join(facts.losses)}, or "
                "package.module:function"
            )
        if self.own_loss and self.class_weights == "balanced":
            raise ValueError("class_weights: given balanced; a loss of your own weights the classes itself")
        if self.time_bins is not None and self.loss != "hazards":
            raise ValueError(f"time_bins: given {self.time_bins}; only task survival with loss hazards has intervals")
        if self.class_weights == "balanced" and not facts.weights_classes:
            raise ValueError(f"class_weights: given balanced; task {self.task} has no classes to balance")
        return self


def _columns_of(target: str | tuple[str, ...]) -> tuple[str, ...]:
    return (target,) if isinstance(target, str) else target


class TargetConfig(TargetKeys):
    """One of several targets of a run (``data.targets``)."""

    target: Column | tuple[Column, ...] = Field(min_length=1, description="a column of the labels, or a list of them")
    name: str = Field("", description="a name: before its metrics and columns; default: its first column")
    weight: AboveZero = Field(1.0, description="a number > 0: factor of its loss in the sum of the losses")
    classes: tuple[Column, ...] | None = Field(
        None, description="a list of names: the classes, in order; default: those of the labels, sorted"
    )

    @property
    def title(self) -> str:
        """The name, or the first column."""
        return self.name or self.columns[0]


def several_facts(targets: Sequence[TargetConfig]) -> TaskFacts:
    """Return the facts of several targets together: their metrics, each after the name of its target and a dot."""
    selecting = [f"{target.title}.{metric}" for target in targets for metric in target.facts.selecting]
    metrics = [f"{target.title}.{metric}" for target in targets for metric in target.facts.metrics]
    return TaskFacts(SEVERAL, "each slide has several targets", (), (*selecting, "loss"), tuple(metrics))


def check_titles(targets: Sequence[TargetConfig]) -> None:
    """Check that there are two or more targets, with different names that can stand before a metric.

    Raises:
        ValueError: There are fewer, or a name is repeated or has other characters.
    """
    titles = [target.title for target in targets]
    if len(titles) < 2:
        raise ValueError(f"targets: given {len(titles)}; allowed: two or more; for one, use target and task")
    wrong = next((title for title in titles if titles.count(title) > 1), None)
    if wrong is not None:
        raise ValueError(
            f"targets: two have the name {wrong!r}; give each a name of its own, as in {{name: {wrong}_2}}"
        )
    wrong = next((title for title in titles if not re.fullmatch(r"[\w -]+", title)), None)
    if wrong is not None:
        raise ValueError(
            f"targets: given the name {wrong!r}; allowed: letters, digits, spaces, _, -; give another name"
        )
