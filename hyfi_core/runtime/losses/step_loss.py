"""The loss of one step on one rank: its value, and the cotangents of the model's output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hyfi_core.errors import RequestError
from hyfi_core.runtime.losses.loss_function import LossFunction

Leaves = list[Any]
LeafCotangents = list[torch.Tensor | None]
"""The cotangent of each leaf of the output; None for leaves without one."""


class ComputedLosses:
    """The losses that the cells of a process compute: the user's function, which may have state, is called once.

    Args:
        cells: number of cells that ask for each loss.
    """

    def __init__(self, cells: int = 1) -> None:
        self.cells = cells
        self._computed: dict[int, tuple[Leaves, torch.Tensor]] = {}
        self._asked: dict[int, int] = {}

    def get(self, microbatch: int, compute: Callable[[], tuple[Leaves, torch.Tensor]]) -> tuple[Leaves, torch.Tensor]:
        """Return (leaves of the output, loss): computed by the first cell that asks, the same for the others."""
        if microbatch not in self._computed:
            self._computed[microbatch] = compute()
        result = self._computed[microbatch]
        asked = self._asked[microbatch] = self._asked.get(microbatch, 0) + 1
        # After the last cell, the graph is freed.
        if asked == self.cells:
            del self._computed[microbatch], self._asked[microbatch]
        return result


class StepLoss(ABC):
    """The loss as a schedule uses it, on every rank; ranks of the last stage of a direction have the output.

    Args:
        device: device of the value.

    Attributes:
        value: the replica's loss (or that of the whole batch), float64 on ranks of the last stage, without dims.
        counted: ``value`` on the one rank that counts it in sums over ranks, zero on others.
        refusal: why the loss could not be computed; its cotangents are then zero.
        needs_outputs: whether it needs ``take`` before the first backward.
        reached: indices of the leaves on which the loss depends.
        computed: the losses that the cells of a process share.
    """

    needs_outputs = False

    def __init__(self, device: torch.device) -> None:
        self.value = torch.zeros((), dtype=torch.float64, device=device)
        self.counted = torch.zeros((), dtype=torch.float64, device=device)
        self.refusal: RequestError | None = None
        self.reached: set[int] = set()
        self.computed = ComputedLosses()

    def take(self, outputs: Mapping[int, Leaves]) -> None:  # noqa: B027 (most losses need none)
        """Take micro-batch -> leaves of the output, of all micro-batches whose last stage this rank has."""

    def _differentiated(self, leaves: Leaves, loss: torch.Tensor, seed: torch.Tensor, counts: bool) -> LeafCotangents:
        """Return the gradient of a loss for each leaf; ``counts``: also add those of parameters that the loss reads."""
        floats = [leaf for leaf in leaves if is_float(leaf)]
        keep_graph = self.computed.cells > 1  # other cells differentiate the same loss
        if counts:
            loss.backward(seed, retain_graph=keep_graph)
            of_floats = iter([leaf.grad for leaf in floats])
        elif floats:
            of_floats = iter(torch.autograd.grad(loss, floats, seed, retain_graph=keep_graph, allow_unused=True))
        else:
            of_floats = iter(())
        gradients = [next(of_floats) if is_float(leaf) else None for leaf in leaves]
        self.reached.update(at for at, gradient in enumerate(gradients) if gradient is not None)
        return gradients

    @abstractmethod
    def cotangents(self, microbatch: int, leaves: Leaves, leads: bool) -> LeafCotangents:
        """Return the cotangents of a micro-batch's output.

        Args:
            microbatch: index of the micro-batch.
            leaves: leaves of its output.
            leads: whether this rank leads the stage: only its cotangents are not zero, since those of a replicated
                value are summed over ranks.
        """


class NoLoss(StepLoss):
    """For forwards without backwards."""

    def cotangents(self, microbatch: int, leaves: Leaves, leads: bool) -> LeafCotangents:
        """Return zeros: nothing depends on the output; see ``StepLoss``."""
        return zeros_of(leaves)


class MicrobatchLoss(StepLoss):
    """The mean of the losses of micro-batches, each computed before its backward.

    Args:
        function: the loss.
        pick: turns the leaves of the output into the loss's argument.
        labels: for each micro-batch, its labels.
        divisor: the divisor of each loss.
        device: device of the value.
    """

    def __init__(
        self,
        function: LossFunction,
        pick: Callable[[Leaves], Any],
        labels: Sequence[torch.Tensor],
        divisor: float,
        device: torch.device,
    ) -> None:
        super().__init__(device)
        self._function, self._pick, self._labels, self._divisor = function, pick, labels, divisor

    def cotangents(self, microbatch: int, leaves: Leaves, leads: bool) -> LeafCotangents:
        """Compute the loss of a micro-batch; see ``StepLoss``."""

        def compute() -> tuple[Leaves, torch.Tensor]:
            with torch.enable_grad():
                # The tape has detached them: the loss has a graph of its own, and its backward ends at these leaves.
                inputs = [leaf.requires_grad_() if is_float(leaf) else leaf for leaf in leaves]
                return inputs, self._function(self._pick(inputs), self._labels[microbatch]) / self._divisor

        try:
            inputs, loss = self.computed.get(microbatch, compute)
        except RequestError as refusal:
            self.refusal = refusal
            return zeros_of(leaves)
        seed = torch.ones_like(loss) if leads else torch.zeros_like(loss)
        gradients = self._differentiated(inputs, loss, seed, counts=leads)
        value = loss.detach().double().reshape(())
        self.value = self.value + value
        if leads:
            self.counted = self.counted + value
        return gradients


def is_float(leaf: Any) -> bool:
    """Whether a leaf of an output may have a gradient."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def zeros_of(leaves: Leaves) -> LeafCotangents:
    """Return zero cotangents."""
    return [torch.zeros_like(leaf, requires_grad=False) if is_float(leaf) else None for leaf in leaves]
