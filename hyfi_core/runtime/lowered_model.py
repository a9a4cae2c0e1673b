"""Lowered models: created once for an image shape and a set of flags, and used in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from hyfi_core.capture.program import Program, Ref
from hyfi_core.lowering.segments import Tape
from hyfi_core.ops.boundary import BoundaryTransfer
from hyfi_core.rules.instructions import RankProgram

Key = tuple[int, int]
"""(stage, direction) of a hosted stage."""


@dataclass(frozen=True, eq=False)  # compared by identity: used as a key
class HostedStage:
    """A stage as one of its ranks runs it.

    Attributes:
        ranked: this rank's instructions.
        tape: the same instructions, grouped into steps.
        position: this rank's position in the stage's grid.
        reads_image: whether the stage takes the image as an input.
    """

    ranked: RankProgram
    tape: Tape
    position: int
    reads_image: bool


class StageNames(Protocol):
    """Which stages use which parameters and buffers; a ``LoweredModel`` is one."""

    @property
    def names(self) -> Sequence[Iterable[str]]:
        """Names of parameters and buffers, for each stage."""
        ...


@dataclass(frozen=True)
class LoweredModel:
    """A model ready to run on this rank for one image shape and one set of flags.

    Attributes:
        program: the whole model.
        hosted: (stage, direction) -> the stage, for all that this rank holds.
        boundaries: (from, to) -> boundary transfer between two stages, the same on every rank.
        parameters: for each stage, the user's names of the parameters that it uses.
        buffers: for each stage, the user's names of the buffers that it uses.
        trained: the user's names of parameters that get a gradient.
        outputs: the leaves of the model's output that ``pick`` takes: values of the program, and constants.
        pick: turns these leaves into the result of the user's ``output`` function.
        digest: digest of the whole model's program, the same on every rank.
    """

    program: Program
    hosted: Mapping[tuple[int, int], HostedStage]
    boundaries: Mapping[tuple[int, int], BoundaryTransfer]
    parameters: tuple[tuple[str, ...], ...]
    buffers: tuple[tuple[str, ...], ...]
    trained: frozenset[str]
    outputs: tuple[Any, ...]
    pick: Callable[[list[Any]], Any]
    digest: str

    @cached_property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """For each stage, the user's names of all that it uses."""
        return tuple((*p, *b) for p, b in zip(self.parameters, self.buffers, strict=True))

    @cached_property
    def stages_of(self) -> Mapping[str, frozenset[int]]:
        """User's name of a parameter or buffer -> the stages that use it by this name."""
        stages: dict[str, frozenset[int]] = {}
        for stage, names in enumerate(self.names):
            stages.update((name, stages.get(name, frozenset()) | {stage}) for name in names)
        return stages

    @cached_property
    def common_leaves(self) -> frozenset[int]:
        """Indices of the leaves of the output that are the same for all images, such as a parameter."""
        return frozenset(
            at for at, leaf in enumerate(self.outputs) if isinstance(leaf, Ref) and self._is_common(leaf.name)
        )

    def _is_common(self, name: str) -> bool:
        """Whether a value depends on neither image, buffers that change, nor random numbers."""
        program = self.program
        needed = program.needed({name})
        changing = {value for value, buffer in program.buffers.items() if buffer in program.mutations}
        if needed & {program.image, *changing}:
            return False
        targets = [op.target for op in program.operators if any(output in needed for output in op.outputs)]
        return all(torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()) for target in targets)

    @property
    def gathered(self) -> tuple[str, ...]:
        """Descriptions of the maps that every rank gathers."""
        # Two directions of one stage gather the same maps.
        return tuple(dict.fromkeys(line for stage in self.hosted.values() for line in stage.ranked.gathered))

    @property
    def only(self) -> HostedStage:
        """The stage of a plan that has one."""
        assert len(self.parameters) == 1
        return self.hosted[0, 0]

    def leaves(self, stage: HostedStage, values: Mapping[str, torch.Tensor]) -> list[Any]:
        """Return the leaves of the output after a run of the last stage."""
        return [values[item.name] if isinstance(item, Ref) else item for item in stage.ranked.outputs]
