"""The record of one operator of PyTorch: all that the engine knows of it, in one place.

Each family of rules exports its records as ``FACTS``; ``rules.table`` has them all. Lowering, cells and costs read
the record and never compare names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hyfi_core.capture.program import Operator
from hyfi_core.rules.builder import Rule
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.windows.arguments import ShapeOf, Sliding
from hyfi_core.rules.windows.taps import Tap

OperatorKind = Literal[
    "elementwise", "norm", "pool", "view", "convolution", "transposed_convolution", "linear", "matmul"
]
Keeps = Literal["nothing", "inputs", "outputs", "inputs and outputs", "inputs and places", "other factors"]
Gradient = Literal["new", "same", "any"]


@dataclass(frozen=True)
class OperatorFacts:
    """What the engine knows of an operator.

    Attributes:
        rule: lowers it on split maps; None: it is only called on whole values.
        kind: decides how its time is modelled. A ``view`` computes nothing: its result has the memory of its input.
        keeps: what autograd keeps for its backward; ``other factors``: a factor if another one has a gradient;
            ``places``: an index for each value of the result.
        gradient: memory in which autograd returns the gradient of an input: ``new`` memory, the ``same`` as that of
            the incoming one if their shapes are equal, or ``any``.
        fresh: whether its first result is new memory that its backward does not read.
        in_place: whether the engine may compute it over an operand, and its backward over the incoming gradient.
        cheap: whether computing it again is faster than reading its result from a disk.
        window: returns the window that it slides over a map.
        tap: returns which input pixel each output pixel is, for operators that only move rows and columns.
        instead: what the user can use instead, if there is no rule.
    """

    rule: Rule | None
    kind: OperatorKind = "elementwise"
    keeps: Keeps = "inputs"
    gradient: Gradient = "any"
    fresh: bool = False
    in_place: bool = False
    cheap: bool = False
    window: Callable[[Operator, ShapeOf], Sliding] | None = None
    tap: Callable[[Operator, tuple[int, ...], Split], Tap | None] | None = None
    instead: str | None = None

    @property
    def product(self) -> bool:
        """Whether it is a convolution or a matrix product."""
        return self.kind in ("convolution", "transposed_convolution", "linear", "matmul")

    @property
    def fusible(self) -> bool:
        """Whether a compiler fuses it with its neighbours: products are calls of a library, and views do no work."""
        return self.kind != "view" and not self.product

    @property
    def passes_on(self) -> bool:
        """Whether its input's cotangent can share the memory of its result's cotangent."""
        return self.kind == "view" or self.in_place or self.gradient == "same"


def view(rule: Rule | None) -> OperatorFacts:
    """Return the record of an operator that renames memory."""
    return OperatorFacts(rule, kind="view", keeps="nothing")


UNKNOWN = OperatorFacts(None)
"""The record of an operator that is in no table: it runs on whole values, and may keep all its inputs."""
