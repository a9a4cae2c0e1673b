"""Members of an ensemble, spread over ranks, look at one slide after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

import hyfi_core
from data.samples.dataset import SlideDataset
from hyfi_core.cells.engine import CellEngine
from hyfi_core.comm.agree import agree
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from hyfi_core.runtime.engine import Engine
from pathology.errors import SlideError
from pathology.predict.members import InputSpec, Member

T = TypeVar("T")


def together(comm: Communicator, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank and return its value; if one of them fails, the slide fails on all. Collective.

    What it does must not be collective itself: a rank that fails in it would leave the others waiting.

    Raises:
        SlideError: with the reason of the first rank that has one.
    """
    return agree(comm, action, (RequestError, SlideError, OSError, ValueError), SlideError)


def grid_of(ranks: int) -> tuple[int, int]:
    """Return rows and columns of a grid of ranks, as square as whole numbers allow, not more rows than columns."""
    rows = max(divisor for divisor in range(1, ranks + 1) if ranks % divisor == 0 and divisor * divisor <= ranks)
    return rows, ranks // rows


@dataclass(frozen=True, eq=False)
class Attribution:
    """What one member says of one image; the same on every rank.

    Attributes:
        logits: (classes,) float64.
        contributions: (classes, h, w) float32.
    """

    logits: NDArray[np.float64]
    contributions: NDArray[np.float32]

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """(classes,): softmax of the logits."""
        weights = np.exp(self.logits - self.logits.max())
        shares: NDArray[np.float64] = weights / weights.sum()
        return shares


class Ensemble:
    """The members' engines on all ranks of a group. Every method is collective.

    Each rank reads and normalises only the part of the image that its part of the network needs. Memory: all members'
    weights, and one image part and its activations at a time.

    Args:
        members: who look.
        spec: what they share.
        comm: the group; all its ranks work on every slide.
        cells: rows and columns, where one rank looks at an image cell by cell, in the memory of a cell.

    Raises:
        RequestError: a model cannot be spread over the ranks, or more than one rank is to work cell by cell.
    """

    def __init__(
        self, members: Sequence[Member], spec: InputSpec, comm: Communicator, cells: tuple[int, int] | None = None
    ) -> None:
        shape = (1, 3, *spec.size_px)
        self._comm = comm
        self._members = tuple(members)
        self._engines: list[Engine | CellEngine]
        if cells is None:
            plan = hyfi_core.ParallelPlan(grids=(grid_of(comm.size),))
            self._engines = [hyfi_core.parallelize(member.model.eval(), shape, plan, comm) for member in members]
        elif comm.size > 1:
            raise RequestError(
                f"cells {cells[0]},{cells[1]} with {comm.size} ranks: one process goes through cells; leave out either"
            )
        else:
            self._engines = [CellEngine(member.model.eval(), shape, cells) for member in members]

    def attribute(self, dataset: SlideDataset, index: int) -> list[Attribution]:
        """Return what every member says of a sample of ``dataset``.

        Raises:
            SlideError: the pixels cannot be read, or a member's output is not finite.
        """
        found = []
        for member, engine in zip(self._members, self._engines, strict=True):
            logits, contributions = self._attribute(member, engine, dataset, index)
            if not bool(torch.isfinite(logits).all()):
                raise SlideError(f"the network's output is not finite: {logits[0].tolist()}")
            found.append(
                Attribution(
                    logits[0].double().cpu().numpy(),
                    contributions[0].float().cpu().numpy(),
                )
            )
        return found

    def _attribute(
        self, member: Member, engine: Engine | CellEngine, dataset: SlideDataset, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def read(box: Box) -> torch.Tensor:
            return member.normalisation(torch.from_numpy(dataset.read(index, box))[None])

        if isinstance(engine, CellEngine):
            return engine.attribute(lambda box: together(self._comm, lambda: read(box)))  # as each cell comes to it
        box = engine.input_box
        part = together(self._comm, lambda: read(box))
        return engine.attribute(_given(part, box))


def _given(part: torch.Tensor, box: Box) -> Callable[[Box], torch.Tensor]:
    """Return images as the engine asks for them: the one box that was read beforehand."""

    def images(asked: Box) -> torch.Tensor:
        if not box.contains(asked):
            raise ValueError(f"the engine asks for {asked}, but announced {box}")
        rows, columns = asked.relative_to(box).slices()
        return part[:, :, rows, columns]

    return images
