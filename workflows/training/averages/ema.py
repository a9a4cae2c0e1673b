"""Exponential moving average (EMA) of the weights, which often performs better than the weights themselves.

After step t:  average ← d · average + (1 − d) · weights,  d = min(decay, (1 + t) / (10 + t))

With the growing d, the first weights lose their influence quickly; d depends only on the step, so it is not saved.
Running statistics of batch norm are averaged like weights; integer counters are not averaged. (Polyak and Juditsky,
1992; the warm-up is that of TensorFlow's ExponentialMovingAverage.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from hyfi_core.runtime.calls.local_use import local_state
from workflows.training.averages.averaged_weights import AveragedWeights


class MovingAverage(AveragedWeights):
    """The moving average of one rank's tensors, bitwise independent of the plan.

    Memory: one more copy of the weights that the rank holds.

    Args:
        model: The module whose ``state_dict`` is averaged; training updates its tensors in place.
        decay: Between 0 and 1.
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self._average = {name: value.detach().clone() for name, value in self._floats().items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights of ``step``."""
        # From the step alone, so that a resumed run averages as one that was never interrupted.
        decay = min(self._decay, (1 + step) / (10 + step))
        weights = self._floats()
        # average + (1 − d) · (weights − average): a few kernels for all tensors; one by one, small tensors cost a
        # launch each.
        torch._foreach_lerp_(list(self._average.values()), [weights[name] for name in self._average], 1 - decay)

    @torch.no_grad()
    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Copy a saved average, under the names of the user's model."""
        for name, value in self._average.items():
            value.copy_(saved[name])

    def of(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return entries of the model's ``state_dict`` with averages in place of weights, not copied."""
        # By memory, not by name: a tied weight has several names in the state, but is averaged once.
        averages = {value.data_ptr(): self._average[name] for name, value in self._floats().items()}
        return {name: averages.get(value.data_ptr(), value) for name, value in state.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager in which the average replaces the weights; they are restored bitwise afterwards."""
        weights = self._floats()
        # A copy: the weights cannot be computed back from the average.
        backup = {name: value.clone() for name, value in weights.items()}
        self._copy(self._average, weights)
        try:
            yield
        finally:
            self._copy(backup, weights)

    @staticmethod
    @torch.no_grad()
    def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
        for name, value in source.items():
            target[name].copy_(value)

    def _floats(self) -> dict[str, torch.Tensor]:
        """Return the model's floating-point tensors that this rank holds by name, each tied tensor once."""
        pointers: set[int] = set()
        tensors = {}
        for name, value in local_state(self._model).items():
            # Parameters of other stages stay on the meta device. A tied weight that is updated under each name would be
            # averaged twice.
            if value.is_floating_point() and not value.is_meta and value.data_ptr() not in pointers:
                pointers.add(value.data_ptr())
                tensors[name] = value
        return tensors
