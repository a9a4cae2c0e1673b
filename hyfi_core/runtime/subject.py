"""What all runners of a process share: the model, its tensors by the values of a program, and its captured programs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hyfi_core.capture.autocast import under_autocast
from hyfi_core.capture.export import capture
from hyfi_core.capture.module_state import same_modes
from hyfi_core.capture.program import KEY, Program
from hyfi_core.capture.released import Former, device_of, dtype_of, fill, release
from hyfi_core.capture.state_watch import StateWatch
from hyfi_core.capture.storing.filled_caches import compute_the_same, of_empty_caches
from hyfi_core.capture.verify import mixes_images, verify_capture
from hyfi_core.errors import RequestError
from hyfi_core.lowering.compiling.segment_compiler import SegmentCompiler
from hyfi_core.plan.batch_shapes import BatchShapes, Shape
from hyfi_core.plan.fused_runs import FusedRuns
from hyfi_core.runtime.backward import LocalValues
from hyfi_core.runtime.batch_reader import lays_channels_last
from hyfi_core.runtime.calls.local_use import own_use
from hyfi_core.runtime.executor import evaluating
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.lowered_model import HostedStage
from hyfi_core.runtime.ownership import read_values
from hyfi_core.runtime.settings import EngineSettings
from hyfi_core.stored_state import Weights

CAPTURES_KEPT = 16
"""Number of programs that are kept, for different shapes and states of the module."""


@dataclass
class RandomKey:
    """The part of the random key that changes between runs and steps.

    Attributes:
        seed: rank 0's ``torch.initial_seed()`` when the engine was created.
        step: number of gradient computations so far; restore it to continue from a checkpoint.
        first: this replica's first micro-batch, counted over all replicas.
        share: if replicas share each micro-batch: (its samples on earlier replicas, its samples on all replicas).
    """

    seed: int
    step: int = 0
    first: int = 0
    share: tuple[int, int] | None = None

    def words(self, microbatch: int, images: int) -> torch.Tensor:
        """Return (seed, step, first sample) of a micro-batch, as int64 on the host."""
        if self.share is None:
            sample = (self.first + microbatch) * images
        else:
            before, samples = self.share
            sample = microbatch * samples + before
        return torch.tensor([self.seed, self.step, sample], dtype=torch.int64)


class Bindings:
    """The model's tensors for the values of a stage's program, cached for each stage.

    Args:
        model: the user's module. Its tensors must be changed in place only, as by optimizers and ``load_state_dict``.
        random: the key of random operators.

    Attributes:
        parameters_once: the user's names -> parameters; tied ones under their first name.
    """

    def __init__(self, model: nn.Module, random: RandomKey) -> None:
        self._model = model
        self._random = random
        # References to released tensors; name -> stages that use a tensor. Empty unless ``share`` has released any.
        self._former: Former = []
        self._stages: Mapping[str, Set[int]] = {}
        self._read()

    def _read(self) -> None:
        """Read the tensors of the model, and forget which of the earlier ones each stage uses."""
        model = self._model
        self._parameters: LocalValues = dict(model.named_parameters(remove_duplicate=False))
        self._buffers: LocalValues = dict(model.named_buffers(remove_duplicate=False))
        self.parameters_once = dict(model.named_parameters())
        # ``share`` may have put other tensors in the place of those that stages were bound to.
        self._bound: dict[HostedStage, tuple[LocalValues, LocalValues]] = {}
        self._held_ids = _held_ids(model)

    def share(
        self,
        stages: Mapping[str, Set[int]],
        groups: Groups,
        releases: bool,
        weights: Weights | None,
        device: torch.device,
    ) -> None:
        """Take rank 0's values, or read those of tensors on the meta device; release tensors that only other ranks use.

        Args:
            stages: name of a parameter or buffer -> stages that use it; the same on every rank.
            groups: the plan's groups.
            releases: whether to release, or not to read, the tensors that only stages on other ranks use.
            weights: values of tensors that are on the meta device.
            device: device on which these tensors are placed.

        Raises:
            RequestError: on every rank: the weights do not fit.
        """
        tensors = [tensor for tensor in (*self._model.parameters(), *self._model.buffers()) if not tensor.is_meta]
        for tensor in tensors:
            # ``.data``: a leaf that requires a gradient must not be written in place.
            groups.all.broadcast(tensor.data)
        releases = releases and groups.placement.stages > 1
        if weights is not None:
            fill(self._model, read_values(self._model, stages if releases else {}, groups, weights, device))
        if releases:
            self._stages = stages
            self._former = release(self._model, {name for name, users in stages.items() if not groups.has(users)})
        self._read()

    def refuse_released(self, names: Sequence[Iterable[str]], users: Callable[[Set[int]], Set[int]]) -> None:
        """Refuse a program that uses tensors on ranks that have released them; the same on every rank.

        Args:
            names: for each stage, the names of the parameters and buffers that it uses.
            users: stages -> the ranks that have any of them.

        Raises:
            RequestError: there is such a tensor; the message names the first.
        """
        for stage, used in enumerate(names):
            for name in used:
                # ``_stages`` has the stages that used a tensor when it was released on all ranks without any of them.
                if name in self._stages and not users({stage}) <= users(self._stages[name]):
                    raise RequestError(
                        f"{name!r} of the model is now used in stage {stage}, whose ranks have released it: no "
                        f"operator of that stage used it in the mode in which parallelize was called; pass "
                        f"release=False, or choose plan.cuts that keep all its uses in one stage"
                    )

    def refuse_replaced(self) -> None:
        """Refuse a model whose parameters or buffers were replaced.

        Raises:
            RequestError: one is new or was replaced; the message names the first.
        """
        if self._held_ids == _held_ids(self._model):  # takes a few per cent of the time of the loop below
            return
        for kind, expected, current in (
            ("parameter", self._parameters, self._model.named_parameters(remove_duplicate=False)),
            ("buffer", self._buffers, self._model.named_buffers(remove_duplicate=False)),
        ):
            for name, tensor in current:
                if expected.get(name) is not tensor:
                    raise RequestError(
                        f"{kind} {name!r} of the model was {'replaced' if name in expected else 'added'} after "
                        f"parallelize; change values in place (copy_, load_state_dict), or call parallelize again"
                    )
        self._held_ids = _held_ids(self._model)

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The model's buffers by all of their names, as they were last checked."""
        return self._buffers

    def begin(self, stage: HostedStage, part: torch.Tensor | None, microbatch: int = 0) -> LocalValues:
        """Return value name -> tensor, before the first instruction, in a new dict: constants, weights, key, image.

        Args:
            stage: a stage that this rank holds.
            part: the rank's part of the image, None if the stage does not read it.
            microbatch: its number in the step.
        """
        program = stage.ranked.program
        parameters, buffers = self._of(stage)
        key = self._random.words(microbatch, program.values[program.image].shape[0])
        values = {**program.constants, **parameters, **buffers, KEY: key}
        if part is not None:
            values[program.image] = part
        return values

    def parameters(self, stage: HostedStage) -> LocalValues:
        """Return value name -> parameter; do not change it."""
        return self._of(stage)[0]

    def divided(self, names: Iterable[str], staged: bool) -> tuple[set[int], dict[int, str]]:
        """Return (ids of the parameters in ``names``, id -> name of tensors that only other stages use).

        Args:
            names: names of parameters and buffers that this rank's stages use.
            staged: whether there are several stages. Otherwise all ranks have all tensors, and the dict is empty.
        """
        named = {**self._parameters, **self._buffers}
        own = {id(named[name]) for name in names}
        own_parameters = own & {id(parameter) for parameter in self._parameters.values()}
        if not staged:
            return own_parameters, {}
        # A released tensor still exists only if the user's code, such as the loss, refers to it.
        former = {id(tensor): name for reference, name in self._former if (tensor := reference()) is not None}
        return own_parameters, former | {id(t): name for name, t in named.items() if id(t) not in own}

    def _of(self, stage: HostedStage) -> tuple[LocalValues, LocalValues]:
        """Return the (parameters, buffers) of a stage, by their names in the program."""
        if stage not in self._bound:
            program = stage.ranked.program
            parameters = {value: self._parameters[name] for value, name in program.parameters.items()}
            buffers = {value: self._buffers[name] for value, name in program.buffers.items()}
            self._bound[stage] = (parameters, buffers)
        return self._bound[stage]


def _held_ids(model: nn.Module) -> list[tuple[int, ...]]:
    """Return, for each module, the ids of its tensors, submodules and their names: equal if nothing was replaced.

    The caller keeps the tensors alive, so that no new one has the id of one that was replaced.
    """
    holdings, reached = [], [model]
    visited = {id(model)}
    for module in reached:  # the loop appends children
        members = (module._parameters, module._buffers, module._modules)
        holdings.append(tuple(id(item) for by_name in members for pair in by_name.items() for item in pair))
        for child in module._modules.values():
            if child is not None and id(child) not in visited:
                visited.add(id(child))
                reached.append(child)
    return holdings


@dataclass(frozen=True)
class Subject:
    """The model and settings shared by all runners of a process.

    Attributes:
        model: the user's module.
        settings: chosen by the caller of ``parallelize``.
        shapes: shapes of the batch of one replica and its micro-batches.
        device: device of the model.
        dtype: dtype of images: that of the parameters by default.
        bindings: the model's tensors by the values of a stage's program.
        compiler: compiler of segments; None: they run as they are.
        channels_last: whether images are converted to this format.
        programs: captured programs, by shape and flags.
        runs: fused runs chosen by memory, for cells in evaluation mode.
    """

    model: nn.Module
    settings: EngineSettings
    shapes: BatchShapes
    device: torch.device
    dtype: torch.dtype
    bindings: Bindings
    compiler: SegmentCompiler | None = None
    channels_last: bool = False
    programs: dict[Any, Program] = field(default_factory=dict)
    runs: dict[Any, FusedRuns] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        settings: EngineSettings,
        shapes: BatchShapes,
        random: RandomKey,
        compiler: SegmentCompiler | None = None,
    ) -> Subject:
        """Return the subject for a model; nothing is captured yet."""
        dtype = settings.image_dtype or dtype_of(model)
        return cls(model, settings, shapes, device_of(model), dtype, Bindings(model, random), compiler)

    def lays_channels_last(self, grids: Sequence[tuple[int, int]]) -> bool:
        """Return whether images are converted to channels-last: as the user chose, or where it makes the model faster.

        Args:
            grids: (rows, columns) of each stage's grid of ranks.
        """
        memory_format, autocast = self.settings.memory_format, self.settings.autocast
        return lays_channels_last(
            memory_format, self.model, autocast, lambda: self.program(self.shapes.widest), grids, self.device
        )

    def verify(self) -> None:
        """Compare the model with its capture on small images; warn of predictions that depend on micro-batches.

        Raises:
            RequestError: they differ.
        """
        with own_use():  # if another engine has the same model, its hooks must not refuse these calls
            facts = (self.model, self.shapes.micro, self.dtype, self.settings.output)
            not_compared = verify_capture(*facts)  # why, if the comparison was not possible
            mixes = self.shapes.micro[0] < self.shapes.whole[0] and mixes_images(*facts)
        if mixes:
            warnings.warn(
                f"{type(self.model).__name__} mixes the images of a batch in evaluation mode, as norms without running "
                f"statistics do: predict computes micro-batches of {self.shapes.micro[0]}, so that its output is not "
                f"that of the whole batch; it is with plan.microbatches=1",
                stacklevel=2,
            )
        if not_compared is not None:
            name = type(self.model).__name__
            warnings.warn(f"{name} could not be compared with its capture: {not_compared}", stacklevel=2)

    @cached_property
    def watch(self) -> StateWatch:
        """The watch of the model's Python state."""
        return StateWatch(self.model)

    def program(self, shape: Shape) -> Program:
        """Return the captured model for a shape of micro-batches, in the state that ``watch`` last observed.

        With autocast, its values have the dtypes that autocast gives them.
        """
        state = self.watch.observed or self.watch.observe()
        if (shape, state) not in self.programs:
            # Drop the oldest: ranks have captured in the same order, so all drop, and capture again, the same program.
            while len(self.programs) >= CAPTURES_KEPT:
                self.programs.pop(next(iter(self.programs)))
                self.runs.clear()  # they are keyed by the identity of programs
            # A capture may change the state, such as by filling a cache; the program belongs to the state after it.
            program = self.watch.settled(lambda: self._captured(shape))
            state = self.watch.observed or state  # the state after the capture
            if (shape, state) not in self.programs:
                # Ranks must have the same programs, but the state may have changed on this rank alone.
                self.programs[shape, state] = self._earlier_equal(shape, program)
        return self.programs[shape, state]

    def evaluated(self, shape: Shape) -> Program | None:
        """Return the model captured in evaluation mode; None if that is its mode now, or if it cannot be captured."""
        if not any(module.training for module in self.model.modules()):
            return None
        program = None
        with evaluating(self.model, self.device):
            self.watch.observe()
            with suppress(RequestError):  # a prediction will raise it
                program = self.program(shape)
        self.watch.observe()  # the state with the earlier mode, which the module has again
        return program

    def _captured(self, shape: Shape) -> Program:
        """Return a new capture in which the module's caches are computed, with the dtypes of autocast."""
        program = capture(self.model, shape, self.dtype)
        empty = of_empty_caches(self.model, program, lambda: capture(self.model, shape, self.dtype))
        kept, autocast = self._instead(empty, program), self.settings.autocast
        return kept if autocast is None else under_autocast(kept, autocast, self.device.type)

    def _earlier_equal(self, shape: Shape, program: Program) -> Program:
        """Return an earlier program that computes the same, and remove it from its state; without one, ``program``.

        The user may have called the module, perhaps on this rank alone, and so filled a cache in it. This rank must
        still have the same program as the others.
        """
        for size, state in [*self.programs]:
            candidate = self.programs[size, state]
            alike = size == shape and same_modes(state, self.watch.observed)
            if alike and compute_the_same(candidate, program):
                return self._instead(self.programs.pop((size, state)), program)
        return program

    def _instead(self, program: Program, representative: Program) -> Program:
        """Return ``program``, which replaces ``representative``; the watch compares constants that only one has."""
        own = {id(tensor): tensor for tensor in program.constants.values()}
        others = {id(tensor): tensor for tensor in representative.constants.values()}
        only_one_has = own.keys() ^ others.keys()
        self.watch.compare(tensor for key, tensor in (own | others).items() if key in only_one_has)
        return program
