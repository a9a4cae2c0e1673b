"""How outputs of an ordinal model become probabilities of grades, by the name of the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from workflows.tasks.ordinal import corn, cumulative_link


@dataclass(frozen=True)
class GradeLink:
    """One way to turn outputs into probabilities of K grades.

    Attributes:
        above: From outputs (…, K − 1) to log P(grade > k), (…, K − 1), which never rises with k.
        outputs_of: The inverse of ``above``.
        losses: From outputs (N, K − 1) and grades (N,) to the negative log-likelihood of each sample, (N,).
    """

    above: Callable[[torch.Tensor], torch.Tensor]
    outputs_of: Callable[[torch.Tensor], torch.Tensor]
    losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def probabilities(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the probability of each grade, (…, K), of outputs (…, K − 1)."""
        higher = self.above(outputs).exp()
        return torch.cat([torch.ones_like(higher[..., :1]), higher], -1) - torch.nn.functional.pad(higher, (0, 1))


LINKS = {
    "corn": GradeLink(corn.above, corn.outputs_of, corn.corn_losses),
    "cumulative_link": GradeLink(cumulative_link.above, cumulative_link.outputs_of, cumulative_link.losses),
}
"""The links by the value of ``data.loss``."""
