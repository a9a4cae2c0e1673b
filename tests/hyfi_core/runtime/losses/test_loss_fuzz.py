"""Random losses of weights, masks, ranks and pairs, on random plans: as one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hyfi_core.runtime.losses.reference import CLASSES, PLANS, assert_loss_of_whole_batch

TERMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross_entropy": lambda out, y: F.cross_entropy(out, y, reduction="none"),
    "focal": lambda out, y: (1 - out.softmax(1)[range(len(y)), y]) ** 2 * F.cross_entropy(out, y, reduction="none"),
    "squares": lambda out, y: (out - F.one_hot(y, CLASSES)).square().mean(1),
    "hinge": lambda out, y: F.relu(1 - out[range(len(y)), y]),
}
NORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor | float]] = {
    "samples": lambda weight, mask: float(len(mask)),
    "weights": lambda weight, mask: (weight * mask).sum() + 1e-3,
    "masked": lambda weight, mask: mask.sum().clamp(min=1),
    "one": lambda weight, mask: 1.0,
}
BATCHES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "none": lambda score, time: score.sum() * 0,
    "cox": lambda score, time: (
        -(score[time.argsort(descending=True)] - torch.logcumsumexp(score[time.argsort(descending=True)], 0)).mean()
    ),
    "ranking": lambda score, time: F.softplus(
        (score[:, None] - score[None]) * (time[:, None] - time[None]).sign()
    ).sum(),
    "hardest": lambda score, time: score.square().topk(max(1, len(score) // 2)).values.sum(),
    "spread": lambda score, time: score.var(correction=0),
    "decorrelated": lambda score, time: ((score - score.mean()) * (time - time.mean())).mean().square(),
}


@dataclass(frozen=True)
class RandomLoss:
    """A sum over samples with weights and a mask, by some norm, and a term of the whole batch."""

    term: str
    norm: str
    batch: str
    share: float
    masks: bool

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Labels have class, weight, mask and time of each sample."""
        index, weight, mask, time = labels.unbind(1)
        mask = (mask > 0.4).double() if self.masks else torch.ones_like(mask)
        terms = TERMS[self.term](logits, index.long()) * weight * mask
        return terms.sum() / NORMS[self.norm](weight, mask) + self.share * BATCHES[self.batch](logits[:, 0], time)


def random_labels(count: int, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.rand(count, 4, generator=generator, dtype=torch.float64)
    drawn[:, 0] = torch.randint(0, CLASSES, (count,), generator=generator)
    return drawn


LOSSES = st.builds(
    RandomLoss,
    st.sampled_from(sorted(TERMS)),
    st.sampled_from(sorted(NORMS)),
    st.sampled_from(sorted(BATCHES)),
    st.floats(0.1, 2.0),
    st.booleans(),
)
CASES = {"loss": LOSSES, "plan": st.sampled_from(sorted(PLANS)), "size": st.integers(1, 3), "seed": st.integers(0, 999)}
GIVEN = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@given(**CASES)
@settings(max_examples=12, **GIVEN)
def test_random_losses(loss: RandomLoss, plan: str, size: int, seed: int) -> None:
    assert_loss_of_whole_batch(loss, random_labels, PLANS[plan], microbatch=size, seed=seed)


@pytest.mark.soak
@given(**CASES)
@settings(max_examples=300, **GIVEN)
def test_many_random_losses(loss: RandomLoss, plan: str, size: int, seed: int) -> None:
    assert_loss_of_whole_batch(loss, random_labels, PLANS[plan], microbatch=size, seed=seed)
