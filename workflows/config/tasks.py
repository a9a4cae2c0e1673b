"""The facts of each task that need no heavy import: its losses, its metrics, the shape of its target."""

from __future__ import annotations

from dataclasses import dataclass

LOWER_IS_BETTER = frozenset({"loss", "calibration_error", "mae", "rmse", "brier"})
"""Metrics that are better if lower, of all tasks."""


def lower_is_better(metric: str) -> bool:
    """Whether a metric is better if lower; with several targets, the target's name comes first: ``age.mae``."""
    return metric.rpartition(".")[2] in LOWER_IS_BETTER


@dataclass(frozen=True)
class TaskFacts:
    """The facts of one task.

    Attributes:
        name: As ``data.task``.
        about: What a slide's label is, as a phrase.
        losses: Values of ``data.loss``, the default first.
        selecting: Metrics that may select the best checkpoint, the default first.
        metrics: All metrics, in the order in which they are shown, without ``loss``.
        columns: How many columns ``data.target`` may name: the fewest, and the most.
        weights_classes: Whether ``data.class_weights: balanced`` has a meaning.
        samples_classes: Whether each slide has one class, so that ``data.sampling: balanced`` has a meaning.
        outputs: Number of the model's outputs, if the task fixes it.
        outputs_fewer: Number of ``model.classes`` minus the number of outputs, if the classes fix the outputs.
        of_case: The label of a case whose slides have different ones, in metrics by case.
    """

    name: str
    about: str
    losses: tuple[str, ...]
    selecting: tuple[str, ...]
    metrics: tuple[str, ...]
    columns: tuple[int, int] = (1, 1)
    weights_classes: bool = False
    samples_classes: bool = False
    outputs: int | None = None
    outputs_fewer: int | None = None
    of_case: str = "one label for each case"


_MULTICLASS = TaskFacts(
    "multiclass",
    "each slide has one of two or more classes",
    ("cross_entropy",),
    ("auroc", "balanced_accuracy", "f1", "quadratic_kappa", "calibration_error", "loss"),
    ("auroc", "balanced_accuracy", "accuracy", "f1", "quadratic_kappa", "calibration_error"),
    weights_classes=True,
    samples_classes=True,
    outputs_fewer=0,
    of_case="the last of these classes in the order of the model's outputs (model.classes)",
)
_MULTILABEL = TaskFacts(
    "multilabel",
    "each slide has any number of labels: target is a list of columns of yes and no, or one column of names with ; "
    "between them",
    ("bce",),
    ("auroc", "average_precision", "balanced_accuracy", "f1", "loss"),
    ("auroc", "average_precision", "balanced_accuracy", "f1"),
    columns=(1, 1000),
    weights_classes=True,
    outputs_fewer=0,
    of_case="every label that one of the slides has",
)
_ORDINAL = TaskFacts(
    "ordinal",
    "each slide has one of several grades with an order: that of their numbers, or of model.classes",
    ("corn", "cumulative_link"),
    ("quadratic_kappa", "mae", "balanced_accuracy", "loss"),
    ("quadratic_kappa", "mae", "balanced_accuracy", "accuracy"),
    weights_classes=True,
    samples_classes=True,
    outputs_fewer=1,
    of_case="the highest grade",
)
_REGRESSION = TaskFacts(
    "regression",
    "each slide has a number",
    ("huber", "mse"),
    ("mae", "rmse", "r2", "spearman", "loss"),
    ("mae", "rmse", "r2", "spearman"),
    outputs=1,
    of_case="their mean (with data.case_aggregate: max, the largest)",
)
_SURVIVAL = TaskFacts(
    "survival",
    "each slide has a time, and whether it ended with an event or was censored: target is [time, event]",
    ("cox", "hazards"),
    ("concordance", "uno_concordance", "time_auroc", "loss"),
    ("concordance", "uno_concordance", "time_auroc", "brier"),
    columns=(2, 2),
    of_case="the latest time",
)
TASKS = {facts.name: facts for facts in (_MULTICLASS, _MULTILABEL, _ORDINAL, _REGRESSION, _SURVIVAL)}
"""The tasks by name."""
