"""One of several targets: its task, its slice of the outputs, and its columns of the labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from data.samples.labels import Target
from workflows.tasks.task import Task, loss_over, make_loss

MISSING_NUMBER = float("nan")
"""Every number of a target that a slide lacks."""


@dataclass(frozen=True)
class TargetPart:
    """One of several targets.

    ::

        outputs (N, K)      grade  grade │ age │ risk          outputs = [0, 2)   numbers = [0, 1)
        labels  (N, W)      grade        │ nan │ time event

    Attributes:
        name: The target's name, which stands before its metrics and columns.
        task: The task of the target.
        weight: Factor of its loss.
        labelled: Share of the training slides that have a label for this target.
        outputs: [first, stop) of the model's outputs.
        numbers: [first, stop) of the numbers of a slide's label.
    """

    name: str
    task: Task
    weight: float
    labelled: float
    outputs: tuple[int, int]
    numbers: tuple[int, int]

    def label_of(self, target: Target) -> Target | None:
        """Return the label of this target, from that of all; None if the slide lacks it."""
        assert isinstance(target, tuple)
        own = target[slice(*self.numbers)]
        # NaN, the only number that is not itself.
        if own[0] != own[0]:
            return None
        return int(own[0]) if self.task.facts.samples_classes else own

    def labels_of(self, targets: Sequence[Target]) -> list[Target]:
        """Return the labels of the slides that have one."""
        return [own for target in targets if (own := self.label_of(target)) is not None]

    def has_label(self, targets: torch.Tensor) -> torch.Tensor:
        """Return which of N slides have a label, (N,) bool; ``targets``: (N, W) of all."""
        return ~targets[:, self.numbers[0]].isnan()

    def labelled_rows(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this target's outputs and labels, as its task takes them, of the slides that have a label."""
        rows = self.has_label(targets)
        return outputs[rows][:, slice(*self.outputs)], self._as_task(targets[rows][:, slice(*self.numbers)])

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch without its weight, a scalar.

        The mean over labelled slides would depend on how a batch is divided. So the sum is divided by the number of
        slides times the share of training slides that are labelled: on average, the result is the same.
        """
        own_outputs, labels = self.labelled_rows(outputs, targets)
        if not len(labels):
            # 0 with a graph: backward must find a gradient on every rank, though no slide has a label.
            return (outputs[:, slice(*self.outputs)] * 0).sum()
        loss = self._loss(own_outputs, labels)
        if self.over_batch:
            return loss  # it compares slides, and is no sum over them
        return loss * (len(labels) / (len(targets) * self.labelled))

    @property
    def over_batch(self) -> bool:
        """Whether the loss compares the slides of a batch."""
        return loss_over(self.task) == "batch"

    @cached_property
    def _loss(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        return make_loss(self.task, 1)

    @cached_property
    def _example(self) -> torch.Tensor:
        """The tensor of one label, for its dims and dtype."""
        empty: Target = 0 if self.task.facts.samples_classes else (0.0,) * self.task.label_numbers
        return self.task.tensor([empty])

    def _as_task(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return labels, (N, numbers of a label), with the dims and the dtype of the task's ``tensor``."""
        flat = numbers[:, 0] if self._example.ndim == 1 else numbers
        return flat.to(self._example.dtype)


def parts_of(tasks: Sequence[tuple[str, Task, float, float]]) -> tuple[TargetPart, ...]:
    """Return targets from (name, task, weight, share of labelled slides), with slices of outputs and label numbers."""
    parts: list[TargetPart] = []
    first_output = first_number = 0
    for name, task, weight, labelled in tasks:
        outputs = (first_output, first_output + task.outputs)
        numbers = (first_number, first_number + task.label_numbers)
        parts.append(TargetPart(name, task, weight, labelled, outputs, numbers))
        first_output, first_number = outputs[1], numbers[1]
    return tuple(parts)
