"""Compiled models: what is made once for an image shape and a set of flags, and used at every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.graph.capture import capture
from hyfi_core.graph.instructions import RankProgram
from hyfi_core.graph.lowering import Lowering
from hyfi_core.graph.program import Program, Ref
from hyfi_core.graph.rules import RULES
from hyfi_core.graph.segments import Tape, build_tape

Output = Callable[[Any], Any]


@dataclass(frozen=True)
class Compiled:
    """A model ready to run on this rank for one image shape and one set of flags.

    Attributes:
        ranked: this rank's instructions.
        tape: the same as segments and meetings.
        pick: turns the leaves of the answer into what ``output`` returns.
    """

    ranked: RankProgram
    tape: Tape
    pick: Callable[[list[Any]], Any]

    def leaves(self, values: Mapping[str, torch.Tensor]) -> list[Any]:
        """Return the leaves of the answer after a run."""
        return [values[item.name] if isinstance(item, Ref) else item for item in self.ranked.outputs]


def compile_model(
    model: nn.Module,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    grid: tuple[int, int],
    comm: Communicator,
    output: Output | None,
) -> Compiled:
    """Capture and lower a model; all ranks of the stage call it together and agree on the program before they go on.

    Raises:
        RequestError: the model cannot be captured, has an operator without a rule, or differs between ranks.
    """
    program = capture(model, shape, dtype)
    _agree(program, comm)
    wanted, pick = _wanted(program, output)
    ranked = Lowering(program, grid, comm.rank, RULES).run(wanted)
    named = dict(model.named_parameters(remove_duplicate=False))
    trained = [value for value, name in program.parameters.items() if named[name].requires_grad]
    return Compiled(ranked, build_tape(ranked, trained), pick)


def _agree(program: Program, comm: Communicator) -> None:
    """Refuse to go on when ranks have captured different programs: their messages would not match."""
    if comm.size == 1:
        return
    mine = program.digest()
    same = torch.tensor([int(mine == comm.broadcast_object(mine))])
    comm.all_reduce(same, "min")
    if not int(same):
        raise RequestError(
            "ranks captured different models: build the same model with the same flags and versions on every rank"
        )


def _wanted(program: Program, output: Output | None) -> tuple[tuple[Any, ...], Callable[[list[Any]], Any]]:
    """Return the leaves of the answer that matter, and what puts them into the form that ``output`` returns.

    ``output`` is first tried on names instead of tensors: where it only picks, the maps that it does not pick are
    neither computed nor gathered.
    """
    leaves = program.outputs
    if output is None:
        return leaves, program.unflatten
    try:
        picked = output(program.unflatten(list(leaves)))
    except Exception:
        picked = None  # it computes on tensors: give it all of them
    if isinstance(picked, Ref):
        return (picked,), lambda tensors: tensors[0]
    return leaves, lambda tensors: output(program.unflatten(tensors))
