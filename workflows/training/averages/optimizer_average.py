"""The average that a schedule-free optimizer keeps: its ``eval()`` puts it in place, its ``train()`` undoes that.

Both change the parameters in place, so ``train()`` restores them only up to rounding. Therefore they are copied before,
and copied back afterwards: a run is bitwise the same, however often it validates and saves. Nothing is saved besides
parameters and optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from hyfi_core.runtime.calls.engine_state import EngineState
from workflows.finetuning.optimizers.switching import SwitchingOptimizer
from workflows.training.averages.averaged_weights import AveragedWeights


class OptimizerAverage(AveragedWeights):
    """The average of the parameters of one rank's optimizer.

    Memory: one more copy of the weights that this rank holds, while the average is applied or saved.

    Args:
        engine: Its optimizer is a `SwitchingOptimizer`.
        model: The module that the engine trains.
    """

    def __init__(self, engine: EngineState, model: nn.Module) -> None:
        # Weights of other stages are on the meta device: other ranks hold, and switch, these.
        assert isinstance(engine.optimizer, SwitchingOptimizer)
        self._engine, self._optimizer = engine, engine.optimizer
        self._parameters = [parameter for parameter in model.parameters() if not parameter.is_meta]

    def update(self, step: int) -> None:
        """Do nothing: the optimizer's step has updated the average."""

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: the average follows from parameters and optimizer state."""

    def of(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return entries of the model's ``state_dict`` that this rank owns, with copies of averages in it."""
        # Messages of weights may still be reading or filling these parameters, which `eval()` changes.
        self._engine.settle()
        averages = {}
        with self._switched():
            for parameter in self._parameters:
                # A clone, because leaving the context changes the parameter back in place.
                averages[parameter.data_ptr()] = parameter.detach().clone()
        return {name: averages.get(value.data_ptr(), value) for name, value in state.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager in which the average replaces the weights, on all ranks that compute with them."""
        self._engine.settle()
        with self._switched():
            # Ranks that only compute with these weights have no optimizer to switch: they are sent the average.
            self._engine.share_weights()
            yield

    @contextmanager
    def _switched(self) -> Iterator[None]:
        """Context in which the parameters have the average as their values."""
        # `train()` computes the weights back from the average, which rounds: without this copy, each validation would
        # move them.
        training = [parameter.detach().clone() for parameter in self._parameters]
        self._optimizer.eval()
        try:
            yield
        finally:
            self._optimizer.train()
            with torch.no_grad():
                for parameter, value in zip(self._parameters, training, strict=True):
                    parameter.copy_(value)
