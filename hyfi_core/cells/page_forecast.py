"""Forecast of what the maps of a cell take: its largest step, and what is kept for backward, in memory or spilled.

It follows the rules of ``cells.recomputation`` and ``cells.paged_steps``: what is recomputed is not kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import torch

from hyfi_core.cells.recomputation import DEEPEST, cheap_calls, is_cheap
from hyfi_core.cells.spill_store import blocks_bytes
from hyfi_core.cost.memory.forecast import RECORD_BYTES
from hyfi_core.lowering.segments import OperatorStep, Step, Tape, made_by, taken_by
from hyfi_core.ops.convolution import Convolution
from hyfi_core.ops.max_pool import MaxPool
from hyfi_core.ops.relu import Relu
from hyfi_core.rules.instructions import CollectiveCall, RankProgram

SMALLEST_BYTES = 1 << 16
"""Smaller maps stay in memory: small reads and writes are slow."""


@dataclass(frozen=True)
class PagedForecast:
    """What a cell needs for a stage and a micro-batch.

    Attributes:
        working_bytes: inputs and outputs of its largest step, without weights.
        kept_bytes: peak of what it keeps while cells wait for each other, in memory or spilled, without recomputed
            and small maps.
        stays_bytes: what it keeps in memory in any case: small maps, and records of its steps.
        weights_bytes: weights of the step with the most bytes of them.
        recomputed_bytes: maps that are computed again instead of being kept.
        recomputed: their names in the captured model.
        waits: for each step that waits for other cells, (bytes of its inputs, bytes of its outputs' cotangents).
    """

    working_bytes: int
    kept_bytes: int
    stays_bytes: int = 0
    weights_bytes: int = 0
    recomputed_bytes: int = 0
    recomputed: tuple[str, ...] = ()
    waits: tuple[tuple[int, int], ...] = ()

    def times(self, in_flight: int) -> PagedForecast:
        """Return the needs of ``in_flight`` micro-batches at once: all of them keep maps, but only one computes."""
        many = {name: getattr(self, name) * in_flight for name in ("kept_bytes", "stays_bytes", "recomputed_bytes")}
        return replace(self, **many)


def forecast_pages(
    ranked: RankProgram,
    tape: Tape,
    position: int,
    trains: bool,
    pixels: torch.dtype | None = None,
) -> PagedForecast:
    """Return the memory that a cell needs for a stage and a micro-batch.

    Args:
        ranked: the cell's program.
        tape: its steps.
        position: position of the cell in the stage's grid, row-major.
        trains: whether backward follows.
        pixels: type of the pixels from which the image is computed when it is needed; None: the image is kept.
    """
    sizes = _Sizes(ranked, position, pixels)
    # What is kept for backward: names of values, and for each step the bytes of other tensors.
    saved = _Kept.of(tape, sizes) if trains else _Kept(frozenset(), ((),) * len(tape.steps))
    saved_bytes = (*map(sizes.of_kept, saved.names), *(size for of_step in saved.besides for size in of_step))
    small = sum(size for size in saved_bytes if size < SMALLEST_BYTES)
    records = len(tape.steps) * RECORD_BYTES[trains]
    # For each wait of the tape: bytes of the inputs, and of the cotangents that arrive there in backward.
    waits = tuple(
        (
            sum(stored_bytes(sizes.of(name)) for name in taken_by(step)),
            sum(stored_bytes(sizes.of(name)) for name in made_by(step) if name in tape.active),
        )
        for step in tape.steps
        if _waits(step)
    )
    return PagedForecast(
        # A set, because an in-place step's input and output are one map.
        working_bytes=max((sum(map(sizes.of, {*taken_by(s), *made_by(s)})) for s in tape.steps), default=0),
        kept_bytes=_peak(tape, sizes, saved, trains),
        stays_bytes=records + small,
        weights_bytes=max((sum(map(sizes.of_weight, taken_by(s))) for s in tape.steps), default=0),
        recomputed_bytes=sum(stored_bytes(sizes.of(name)) for name in saved.recomputed),
        # The captured name: rules call their own values "captured~number".
        recomputed=tuple(dict.fromkeys(name.split("~")[0] for name in saved.recomputed)),
        waits=waits,
    )


def _waits(step: Step) -> bool:
    """Whether a step waits for other cells."""
    return isinstance(step, OperatorStep) and isinstance(step.call, CollectiveCall)


class _Sizes:
    """Bytes of a cell's parts; weights and values such as sums over whole maps are not counted."""

    def __init__(self, ranked: RankProgram, position: int, pixels: torch.dtype | None) -> None:
        self.ranked, self._position, self._pixels = ranked, position, pixels
        self._fixed = {*ranked.program.parameters, *ranked.program.buffers, *ranked.program.constants}

    def of(self, name: str) -> int:
        """Return the bytes of this cell's part of a value; 0 for weights and for values without a layout."""
        if name in self._fixed or not (name in self.ranked.splits or name in self.ranked.program.values):
            return 0
        return self.elements(name) * self.ranked.values[name].dtype.itemsize

    def of_kept(self, name: str) -> int:
        """Return the bytes that are kept for a value; for the image, those of its pixels."""
        if self._pixels is not None and name == self.ranked.program.image:
            return self.elements(name) * self._pixels.itemsize
        return self.of(name)

    def of_weight(self, name: str) -> int:
        """Return the bytes of a parameter, 0 for other values."""
        if name not in self.ranked.program.parameters:
            return 0
        return prod(self.ranked.values[name].shape) * self.ranked.values[name].dtype.itemsize

    def elements(self, name: str) -> int:
        """Return the number of elements of this cell's part of a value."""
        shape, split = self.ranked.values[name].shape, self.ranked.splits.get(name)
        return prod(shape if split is None else split.local_shape(shape, self._position))

    def saved_besides(self, step: Step, remade: bool) -> tuple[int, ...]:
        """Return the bytes of each tensor that an operator saves besides values: strips, canvases, indices of maxima.

        Args:
            step: a step of the tape.
            remade: whether the input of a max pool is recomputed, so that its indices are recomputed as well.
        """
        if not isinstance(step, OperatorStep):
            return ()
        operator = step.call.operator
        if isinstance(operator, MaxPool):
            # An index of a maximum takes a byte.
            return () if remade and operator.remakes else tuple(map(self.elements, made_by(step)))
        if not isinstance(operator, Convolution) or operator.halo.transfer.have.empty:
            return ()
        transfer = operator.halo.transfer
        # Either the strips that it has received, or its whole input, the part with its halo.
        if operator.own is not None or not operator.keeps_canvas:
            pixels = tuple(strip.box.area for strip in transfer.receives)
        else:
            pixels = () if transfer.idle else (transfer.need.area,)
        return tuple(self.of(str(step.call.inputs[0])) * count // transfer.have.area for count in pixels)


def _peak(tape: Tape, sizes: _Sizes, kept_pages: _Kept, trains: bool) -> int:
    """Return the peak of kept bytes: values used after a wait and, in training, values needed by backward.

    saved          values kept for backward: they grow through the forward and are all there at its end
    passing        in evaluation, values between the step that computes them and their last use
    cotangents     in backward, the same for cotangents, whose steps run in reverse
    """
    maker: dict[str, int] = {}
    last: dict[str, int] = {}
    image = sizes.ranked.program.image
    if image in sizes.ranked.splits:
        maker[image] = -1
    for at, step in enumerate(tape.steps):
        last.update((name, at) for name in taken_by(step))
        maker.update((name, at) for name in made_by(step))
    waits = [at for at, step in enumerate(tape.steps) if _waits(step)]
    # Changes at each step; their running sums are the bytes alive.
    saved, passing, cotangents = ([0] * (len(tape.steps) + 2) for _ in range(3))
    for name, at in maker.items():
        size, last_use = stored_bytes(sizes.of(name)), last.get(name, at)
        # Kept for backward: it is alive from here to the end of the forward.
        if name in kept_pages.names:
            saved[at + 1] += stored_bytes(sizes.of_kept(name))
        elif not trains:
            # Small maps count, too: they are never stored, but alive.
            passing[at + 1] += size or sizes.of(name)
            passing[last_use + 1] -= size or sizes.of(name)
        if trains and name in tape.active:
            cotangents[at + 1] += size
            cotangents[last_use + 1] -= size
    for at, besides in enumerate(kept_pages.besides):
        saved[at + 1] += sum(map(stored_bytes, besides))
    saved, passing, cotangents = (list(accumulate(changes)) for changes in (saved, passing, cotangents))
    at_forward_end = saved[-1]
    return max([at_forward_end, *(saved[at] + passing[at] + cotangents[at] for at in waits)])


@dataclass(frozen=True)
class _Kept:
    """What a cell keeps for backward, and what it recomputes instead; see ``cells.recomputation``.

    Attributes:
        names: values that are kept.
        besides: for each step, the bytes of each tensor that its operator saves besides values.
        recomputed: values that are computed again.
    """

    names: frozenset[str]
    besides: tuple[tuple[int, ...], ...]
    recomputed: tuple[str, ...] = ()

    @classmethod
    def of(cls, tape: Tape, sizes: _Sizes) -> _Kept:
        """Return what is kept for the backward of a tape, and what is computed again instead.

        A cheap value is recomputed from others, some of them recomputed, too. Its depth is the length of this chain of
        recomputations, 0 for a kept value and for the image; a value that would be deeper than ``DEEPEST`` is kept.
        """
        image = sizes.ranked.program.image
        names = {image} if image in sizes.ranked.splits else set()
        depth, besides, recomputed = dict.fromkeys(names, 0), [], list[str]()
        for step in tape.steps:
            source_depths = [depth[name] for name in taken_by(step) if name in depth and sizes.of(name)]
            operator = step.call.operator if isinstance(step, OperatorStep) else None
            in_place = isinstance(operator, Relu) and operator.overwrites_input
            besides.append(sizes.saved_besides(step, remade=0 < max(source_depths, default=0) < DEEPEST))
            # An in-place step adds a call to its input's recomputation, so the depth stays.
            own_depth = max(source_depths, default=DEEPEST) + (0 if in_place else 1)
            for name in made_by(step):
                if own_depth > DEEPEST or not _is_cheap(step, name, sizes):
                    names.add(name)
                    depth[name] = 0
                else:
                    depth[name] = own_depth
                    if not in_place:
                        recomputed.append(name)
        return cls(names=frozenset(names), besides=tuple(besides), recomputed=tuple(recomputed))


def _is_cheap(step: Step, name: str, sizes: _Sizes) -> bool:
    """Whether a step's value ``name`` is cheap to compute again."""
    if isinstance(step, OperatorStep):
        return name == made_by(step)[0] and is_cheap(step.call, lambda n: sizes.ranked.values[n].shape)
    return cheap_calls(step, name, lambda n: sizes.ranked.values[n].shape) is not None


def stored_bytes(size: int) -> int:
    """Return how many bytes of the store a map of ``size`` bytes takes; 0 for small maps, which are not stored."""
    return blocks_bytes(size) if size >= SMALLEST_BYTES else 0
