"""Attribution: what each place of the last map adds to each logit.

    image ── body, no gradients ──▶ last map ── head, with a tape ──▶ logits
                                        ◀── one backward for each class ──

Activation times gradient, summed over channels. Behind the last map come a mean or a maximum over space and a linear
layer, so all places together and the bias are the logit.
"""

from __future__ import annotations

import torch

from hyfi_core.capture.program import Ref, refs_in
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.lowering.segments import Tape, build_tape
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.plan.layout import Layout
from hyfi_core.plan.transfer import plan_transfer
from hyfi_core.rules.instructions import RankProgram
from hyfi_core.runtime.backward import Values
from hyfi_core.runtime.compiled import Compiled
from hyfi_core.runtime.executor import Executor


def attribute(compiled: Compiled, values: Values, stage: CountedCommunicator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logits ``(B, K)``, contributions ``(B, K, h, w)``), float32, the same on every rank of the stage.

    Args:
        compiled: the model in evaluation mode.
        values: what is there before the first instruction; changed.
        stage: the ranks that hold the parts.

    Raises:
        RequestError: the answer is not one tensor of logits reduced from a map.
    """
    ranked = compiled.only.ranked
    name, body, head = split_tape(ranked)
    Executor(body, stage).forward(values, record=False)
    logits, part = attribute_head(ranked, name, head, values, stage)
    return logits, _whole(part, ranked.splits[name].layout, stage)


def attribute_head(
    ranked: RankProgram, name: str, head: Tape, values: Values, stage: CountedCommunicator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logits, this rank's part of the contributions), float32.

    Args:
        ranked: this rank's program.
        name: the last map.
        head: the tape from there to the answer, with gradients of the map.
        values: what is there before it, this rank's part of the last map among them; changed.
        stage: the ranks that hold the parts.

    Raises:
        RequestError: the answer is not one tensor of logits.
    """
    activation = values[name]
    executor = Executor(head, stage)
    records = executor.forward(values, record=True)
    logits, answer = _logits(ranked, values)
    maps = []
    for index in range(logits.shape[1]):
        seed = torch.zeros_like(logits)
        seed[:, index] = float(stage.rank == 0)  # a replicated answer: the cotangent is a sum over ranks
        found = executor.backward(records, {answer: seed}, {}, keep=True).get(name)
        share = torch.zeros_like(activation) if found is None else activation * found
        maps.append(share.float().sum(1, keepdim=True))
    return logits.float(), torch.cat(maps, 1)


def _logits(ranked: RankProgram, values: Values) -> tuple[torch.Tensor, str]:
    """Return the only tensor of the answer and its name."""
    names = [item.name for item in ranked.outputs if isinstance(item, Ref)]
    if len(names) != 1 or values[names[0]].dim() != 2:
        shapes = [tuple(values[name].shape) for name in names]
        raise RequestError(
            f"contributions need logits of shape (B, classes), the model returns {shapes}; pass output=..."
        )
    return values[names[0]], names[0]


def _whole(part: torch.Tensor, layout: Layout, stage: CountedCommunicator) -> torch.Tensor:
    """Return the whole of a map of which each rank has its part."""
    transfer = plan_transfer(layout.parts, [layout.map] * stage.size, layout.map, stage.rank)
    return Redistribute(transfer).forward(stage, (part.contiguous(),))[0][0]


def last_map(ranked: RankProgram) -> tuple[str, int]:
    """Return (name, index of the instruction behind it) of the last split map on which the answer depends.

    Raises:
        RequestError: no map is reduced to the answer.
    """
    wanted = set(refs_in(ranked.outputs))
    for index in range(len(ranked.instructions) - 1, -1, -1):
        instruction = ranked.instructions[index]
        outputs = [o for o in instruction.outputs if o in wanted and o is not None]
        if not outputs:
            continue
        made = next((o for o in outputs if o in ranked.splits and o in ranked.program.values), None)
        if made is not None and ranked.floating(made) and _is_map(ranked, made):
            return made, index + 1
        wanted.update(name for name in instruction.inputs if name is not None)
    raise RequestError("this model's answer is not reduced from a map, so its pixels have no contributions to show")


def _is_map(ranked: RankProgram, name: str) -> bool:
    """Whether a split value is ``(B, C, H, W)``, not some other shape with space in it."""
    return ranked.splits[name].dims == (2, 3) and len(ranked.values[name].shape) == 4


def split_tape(ranked: RankProgram) -> tuple[str, Tape, Tape]:
    """Return (map, tape up to the last map, tape from there to the answer), the latter with gradients of the map."""
    name, index = last_map(ranked)
    body = build_tape(ranked, (), stop=index)
    head = build_tape(ranked, (name,), start=index)
    return name, body, head
