"""Grades, one for each slide, with an order: conditional probabilities of higher grades."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from numpy.typing import NDArray

from data.samples.grades import in_order
from data.samples.labels import Labels, Target
from hyfi_core.errors import RequestError
from pathology.predict.readout import Readout
from workflows.config.targets import TargetKeys
from workflows.config.tasks import TASKS, TaskFacts
from workflows.tasks.bootstrap import Intervals, share_interval
from workflows.tasks.cases import members_of
from workflows.tasks.multiclass import Multiclass
from workflows.tasks.ordinal.corn import grade_metrics, predicted_grades
from workflows.tasks.ordinal.links import LINKS, GradeLink
from workflows.tasks.ordinal.page import grades_section
from workflows.tasks.ordinal.readout import GradeReadout
from workflows.tasks.page_section import PageSection
from workflows.tasks.task import Aggregation, LabelSource, Task, at_least_float32


@dataclass(frozen=True)
class Ordinal(Multiclass):
    """Grades, which are classes with an order. A target is the index of a grade; there is an output for each step.

    Attributes:
        kind: ``corn`` or ``cumulative_link``.
    """

    facts: ClassVar[TaskFacts] = TASKS["ordinal"]
    kind: str = "corn"

    @classmethod
    def fitted(cls, data: TargetKeys, labels: Labels, train: Sequence[Target]) -> Self:
        """Return the grades, with their weights if they are to be balanced."""
        return replace(super().fitted(data, labels, train), kind=data.named_loss)

    @classmethod
    def of_json(cls, model: Mapping[str, Any]) -> Self:
        """Return the grades of a ``model.json``."""
        kind = str(model.get("ordinal", {}).get("loss", "corn"))
        if kind not in LINKS:
            raise RequestError(f"model.json: ordinal loss {kind!r}; known are {', '.join(LINKS)}")
        return replace(super().of_json(model), kind=kind)

    def to_json(self) -> dict[str, Any]:
        """Return names, weights, and ``ordinal``: ``loss``."""
        return {**super().to_json(), "ordinal": {"loss": self.kind}}

    @property
    def link(self) -> GradeLink:
        """How outputs become probabilities."""
        return LINKS[self.kind]

    @classmethod
    def read_labels(cls, source: LabelSource) -> Labels:
        """Return the grade of each slide; see ``Task`` and `data.samples.grades.in_order`."""
        return in_order(super().read_labels(source), str(source.path), is_given=source.classes is not None)

    @property
    def outputs(self) -> int:
        """Number of grades but one."""
        return len(self.classes) - 1

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean of w_y · ℓ over samples; ℓ is the negative log-likelihood of the grade."""
        return self.losses(outputs, targets).mean()

    def drawn(self, outputs: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the metrics of `workflows.tasks.ordinal.corn`."""
        loss = counts @ self.losses(outputs.double(), targets) / counts.sum(1)
        return {"loss": loss, **grade_metrics(self._predicted(outputs), targets, len(self.classes), counts)}

    def intervals(self, outputs: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor) -> Intervals:
        """Return intervals by bootstrap, of ``accuracy`` by Wilson."""
        intervals = Task.intervals(self, outputs, targets, counts)
        if not len(targets) or not bool(outputs.isfinite().all()):
            return intervals
        return share_interval(intervals, float((self._predicted(outputs) == targets).double().mean()), counts)

    def by_case(
        self, outputs: torch.Tensor, targets: torch.Tensor, of_case: torch.Tensor, how: Aggregation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs and the grade of each case.

        ``mean``: outputs of the mean probabilities; ``max``: those of the slide with the highest mean grade;
        ``logits``: the mean outputs. The grade of a case is the highest grade of its slides.
        """
        case_outputs, case_grades = [], []
        log_higher = self.link.above(outputs.double())  # log P(grade > k), (N, K − 1)
        for members in members_of(of_case):
            count = torch.tensor(len(members), dtype=torch.float64)
            mean = self.link.outputs_of(log_higher[members].logsumexp(0) - count.log())
            # Σ P(grade > k) is the mean grade.
            highest = outputs[members[log_higher[members].exp().sum(1).argmax()]].double()
            pooled = {
                # The inverse of ``above`` rounds, and the mean of one slide is the slide.
                "mean": mean if len(members) > 1 else highest,
                "max": highest,
                "logits": outputs[members].double().mean(0),
            }
            case_outputs.append(pooled[how])
            case_grades.append(targets[members].max())
        return torch.stack(case_outputs), torch.stack(case_grades)

    def calibration(self, outputs: torch.Tensor, targets: torch.Tensor, of_case: torch.Tensor) -> dict[str, Any] | None:
        """Return nothing."""
        return None

    def describe_calibration(
        self, outputs: torch.Tensor, targets: torch.Tensor, fitted: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]] | None:
        """Return nothing."""
        return None

    def describe(self) -> str:
        """Return the grades in their order."""
        return f"grades {' < '.join(self.classes)}"

    def warnings(self, train: Sequence[Target], val: Sequence[Target]) -> list[str]:
        """Return warnings about grades without slides, and validation slides of one grade."""
        absent = [name for index, name in enumerate(self.classes) if index not in set(train)]
        warnings = [f"no training slide has grade {' or '.join(absent)}: the model cannot learn it"] if absent else []
        return [*warnings, *self.evaluation_warnings(val, "validation")]

    def evaluation_warnings(self, targets: Sequence[Target], slides: str) -> list[str]:
        """Return a warning about grades that no slide has."""
        present = set(targets)
        absent = [name for index, name in enumerate(self.classes) if index not in present]
        if len(present) == 1:
            return [f"all {slides} slides are of one grade: quadratic_kappa is undefined"]
        if not present or not absent:
            return []
        return [f"no {slides} slide has grade {' or '.join(absent)}: balanced accuracy leaves it out"]

    def readout(self, calibration: Mapping[str, Any] | None) -> GradeReadout:
        """Return probabilities and the median grade."""
        return GradeReadout(self.classes, self.kind)

    def page(
        self,
        values: NDArray[Any],
        targets: Sequence[Target],
        draws: NDArray[Any],
        readout: Readout,
        before: NDArray[Any] | None = None,
    ) -> PageSection:
        """Return confusion, the curves of each step, and metrics."""
        return grades_section(values, self.tensor(targets), draws, self.classes)

    def _predicted(self, outputs: torch.Tensor) -> torch.Tensor:
        return predicted_grades(self.link.probabilities(outputs.double()))

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample, (N,)."""
        logits = at_least_float32(outputs)
        weights = torch.tensor(self.weights, dtype=logits.dtype, device=logits.device)
        return self.link.losses(logits, targets) * weights[targets]
