"""A step as CUDA graphs: the host starts a graph of thousands of kernels instead of each kernel.

    as it is     image ── kernels … ── output ── loss ── kernels … ── gradients
    recorded     image ─▶ │  graph  │ ─▶ output ── loss ─▶ │  graph  │ ─▶ gradients

A graph repeats kernels on the same memory. So what the user's functions may do differently in each step is not in it:
reading the image and computing the loss happen between graphs, in every step, and their results are copied to where
the graphs read them. The rest of a step is computed from these and from weights and buffers, which keep their memory.

A recorded step is also executed: each graph runs as soon as it is recorded, so that the loss sees its output.

What graphs compute has the same memory in each step. The loss gets copies of outputs, which it may keep; gradients are
those of the last step only, as with several ranks: copy them to compare them with earlier ones.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.runtime.losses.step_loss import LeafCotangents, Leaves, StepLoss
from hyfi_core.runtime.lowered_model import Key
from hyfi_core.runtime.pipeline import Step


class NotRecordableError(Exception):
    """A step does something that graphs cannot repeat."""


class Graph(Protocol):
    """Kernels that are recorded once and repeated on the same memory."""

    def begin(self) -> None:
        """Start recording the current stream, whose kernels are not executed from here on."""
        ...

    def end(self) -> None:
        """Stop recording."""
        ...

    def replay(self) -> None:
        """Execute what was recorded, on the current stream."""
        ...


class CudaGraph:
    """A ``torch.cuda.CUDAGraph``, whose tensors have memory of a pool.

    Args:
        pool: shared by the graphs of a step, which run in the order in which they were recorded.
    """

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def begin(self) -> None:
        """Start recording; see ``Graph``."""
        # Relaxed: threads of cells and of autograd also start kernels, and other threads of the process use the GPU.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")

    def end(self) -> None:
        """Stop recording."""
        with warnings.catch_warnings():
            # Between the losses of two cells there are no kernels.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            self._graph.capture_end()

    def replay(self) -> None:
        """Execute what was recorded."""
        self._graph.replay()


class StepGraph:
    """One recorded step.

    Args:
        new_graph: creates an empty graph.
        parameters: the parameters that get gradients.

    Attributes:
        gradients: the gradient of each parameter, which every replay writes; None if it has none.
    """

    def __init__(self, new_graph: Callable[[], Graph], parameters: Sequence[nn.Parameter]) -> None:
        self._new_graph, self._parameters = new_graph, parameters
        # What a replay runs, in order: graphs, and between them the reading of images and the computing of losses.
        self._replayed: list[Callable[[Sequence[Step]], None]] = []
        self._graph: Graph | None = None
        self.gradients: list[torch.Tensor | None] = []

    def record(self, steps: Sequence[Step], train: Callable[[list[Step]], None]) -> None:
        """Record and execute a step.

        Args:
            steps: steps of this rank, or of each of its cells.
            train: runs them. It must not read memory of the caller that changes later, except through these steps.

        Raises:
            NotRecordableError: the loss has gradients of its own for parameters.
        """
        self._begin()
        try:
            train([self._recorded(number, step) for number, step in enumerate(steps)])
        except BaseException:
            self._abandon()
            raise
        self._end()
        self.gradients = [parameter.grad for parameter in self._parameters]

    def replay(self, steps: Sequence[Step]) -> None:
        """Execute the step for other images and losses.

        Args:
            steps: as in ``record``; parameters have no gradients before, and afterwards those of this step.
        """
        for run in self._replayed:
            run(steps)
        for parameter, gradient in zip(self._parameters, self.gradients, strict=True):
            if gradient is not None:
                # ``grad`` is set if the loss itself now uses the parameter, as it did not when the step was recorded.
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad

    def _begin(self) -> None:
        self._graph = self._new_graph()
        self._graph.begin()

    def _end(self) -> None:
        """End the graph that is being recorded, and execute it."""
        assert self._graph is not None
        graph, self._graph = self._graph, None
        graph.end()
        graph.replay()
        self._replayed.append(lambda steps: graph.replay())

    def _abandon(self) -> None:
        """End a recording in which something has failed."""
        graph, self._graph = self._graph, None
        if graph is not None:
            with contextlib.suppress(RuntimeError):  # it would repeat the first failure
                graph.end()

    def _recorded(self, number: int, step: Step) -> Step:
        """Return a step that reads images and computes losses between graphs.

        Args:
            number: index of the step among those of this rank's cells; a replay takes images and loss of its step at
                this index.
            step: the step that is recorded.
        """
        images: dict[tuple[Key, int], torch.Tensor | None] = {}

        def part(key: Key, microbatch: int) -> torch.Tensor | None:
            if (key, microbatch) not in images:
                images[key, microbatch] = self._image(number, step, key, microbatch)
            return images[key, microbatch]

        loss = _RecordedLoss(step.loss, lambda *given: self._cotangents(number, step, *given))
        return replace(step, part=part, loss=loss)

    def _image(self, number: int, step: Step, key: Key, microbatch: int) -> torch.Tensor | None:
        """End a graph, read the image, and begin the next graph, which reads it from the memory that is returned.

        Replays call ``read_next`` between the two graphs: it puts the image of their own step into the same memory.

        Args:
            number: index of the step among those of this rank's cells.
            step: the step that is recorded.
            key: stage and direction that read the image.
            microbatch: the slice of the batch.
        """
        self._end()
        recorded = step.part(key, microbatch)
        # A copy: the caller may change or free its memory, and passes other memory in the next step.
        image = None if recorded is None else recorded.clone()
        if image is not None:
            memory = image

            def read_next(steps: Sequence[Step]) -> None:
                part = steps[number].part(key, microbatch)
                assert part is not None
                memory.copy_(part)

            self._replayed.append(read_next)
        self._begin()
        return image

    def _cotangents(self, number: int, step: Step, microbatch: int, leaves: Leaves, leads: bool) -> LeafCotangents:
        """End a graph, compute the loss of its output, and begin the next, which reads the cotangents returned.

        Replays call ``compute_next`` between the two graphs. Arguments as of ``_image`` and ``StepLoss.cotangents``.
        """
        self._end()
        before = self._marks()
        of_loss = step.loss.cotangents(microbatch, _copies(leaves), leads)
        # Cotangents are copied, too: a loss may keep its argument, whose ``grad`` must stay that of its own step.
        cotangents = [None if cotangent is None else cotangent.clone() for cotangent in of_loss]
        if self._marks() != before:
            raise NotRecordableError("the loss uses parameters of the model by itself")

        def compute_next(steps: Sequence[Step]) -> None:
            computed = steps[number].loss.cotangents(microbatch, _copies(leaves), leads)
            for memory, cotangent in zip(cotangents, computed, strict=True):
                _put(memory, cotangent)

        self._replayed.append(compute_next)
        self._begin()
        return cotangents

    def _marks(self) -> list[Any]:
        """Return a mark for each parameter that changes when its gradient changes."""
        return [None if p.grad is None else (id(p.grad), p.grad._version) for p in self._parameters]


class _RecordedLoss(StepLoss):
    """A loss that is computed between two graphs."""

    def __init__(self, loss: StepLoss, compute: Callable[[int, Leaves, bool], LeafCotangents]) -> None:
        super().__init__(loss.value.device)
        self._compute = compute

    def cotangents(self, microbatch: int, leaves: Leaves, leads: bool) -> LeafCotangents:
        """Return the cotangents, in memory that later graphs read; see ``StepLoss``."""
        return self._compute(microbatch, leaves, leads)


def _copies(leaves: Leaves) -> Leaves:
    """Return copies of the leaves: a loss may keep them, and the next step overwrites the memory of graphs.

    A tensor that is several leaves is copied once, so that its gradient is the sum for all of them, as without graphs.
    """
    copies: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().clone()
    return [copies[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _put(memory: torch.Tensor | None, cotangent: torch.Tensor | None) -> None:
    """Copy a cotangent (zeros if None) to the memory where graphs read it; ``memory`` None: they do not read it."""
    if memory is None and cotangent is not None:
        raise RequestError(
            "the loss now depends on an output on which it did not depend in the first steps, so that CUDA graphs, "
            'which repeat those, have no gradient for it; pass parallelize(..., cuda_graphs="off")'
        )
    if memory is not None and cotangent is None:
        memory.zero_()
    elif memory is not None and cotangent is not None:
        memory.copy_(cotangent)
