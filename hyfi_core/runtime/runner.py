"""Stage runner: runs the stages of one rank of a plan, or of one cell of a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch

from hyfi_core.capture.module_state import changed_since, describe_value
from hyfi_core.cells.paged_steps import AllStays, PagedSteps, StepMemory, UseOrder
from hyfi_core.cells.pager import Pager
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.waits import Driver, OwnThread, Waits
from hyfi_core.errors import RequestError
from hyfi_core.lowering.segments import Tape
from hyfi_core.plan.batch_shapes import Shape
from hyfi_core.plan.input_part import InputPart
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.runtime.backward import LocalValues
from hyfi_core.runtime.batch_reader import ImageBatch, LocalInput, PixelParts, Reader, uploaded
from hyfi_core.runtime.calls.attribution import ExplainedPart, attribute, join_explanations
from hyfi_core.runtime.calls.input_gradients import UseGradient, differentiate
from hyfi_core.runtime.calls.outputs import described, output_of_batch, undescribed
from hyfi_core.runtime.executor import autocasting
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.losses.loss_function import LossFunction
from hyfi_core.runtime.losses.of_step import loss_of_step
from hyfi_core.runtime.losses.step_loss import NoLoss, StepLoss
from hyfi_core.runtime.lower_model import lower_model
from hyfi_core.runtime.lowered_model import HostedStage, Key, LoweredModel
from hyfi_core.runtime.pipeline import Event, Gradients, Pipeline, Step
from hyfi_core.runtime.stage_exchange import StageExchange
from hyfi_core.runtime.statistics import FoldedStatistics, FollowingStatistics
from hyfi_core.runtime.subject import CAPTURES_KEPT, Subject
from hyfi_core.schedule.action import Action, Schedule
from hyfi_core.schedule.of_plan import PlanSchedules


class StageRunner:
    """Runs the stages of one rank of a plan. All runners of the plan call its methods together.

    Args:
        subject: the model.
        plan: plan of the run.
        comm: all runners of the plan.
        groups: the plan's groups, if they exist already.
        lockstep: the driver of this cell; a cell has its own buffers, and reads its box of the image when it needs it.
            None: this is not a cell.
        pager: pager of all cells of the process; None: no paging.
        updates: whether this runner computes new values of buffers; of the cells of a process, one does.
    """

    def __init__(
        self,
        subject: Subject,
        plan: ParallelPlan,
        comm: Communicator,
        groups: Groups | None = None,
        lockstep: Driver | None = None,
        pager: Pager | None = None,
        updates: bool = True,
    ) -> None:
        self._subject, self._pager, self._updates, self._is_cell = subject, pager, updates, lockstep is not None
        self._driver = OwnThread() if lockstep is None else lockstep
        self._use_orders: dict[HostedStage, UseOrder] = {}  # in which stages use values, for the pager
        cells = plan.cell_grid
        self._cell_count = 1 if cells is None else cells[0] * cells[1]
        self._one_rank = plan.ranks == 1  # before ``by_cells``, after which every cell counts as a rank
        self._placement = Placement.of(plan) if cells is None else Placement.of(plan).by_cells(cells)
        self._plan = plan = plan.by_cells()
        self.groups = Groups(comm, plan, self._placement) if groups is None else groups
        whole = subject.shapes.whole
        self.reader = Reader(plan, whole, self.groups, subject.device, subject.dtype, subject.channels_last)
        self._cache: dict[Any, LoweredModel] = {}  # by (shape of micro-batches, state of the model)
        self._last_state: Hashable = None  # the state of the model that the last call observed
        self._may_be_replaced = True  # whether the model's tensors may have been, since the last call
        self._checked_state: Hashable = None  # the state of the last check
        self._schedules = PlanSchedules(plan, self._placement)
        self._trained: FollowingStatistics | FoldedStatistics | None = None  # running statistics of the last step

    def lowered(self, shape: Shape) -> LoweredModel:
        """Return the lowered model for micro-batches of ``shape``, in the module's state as last observed."""
        subject = self._subject
        # While the state is the one that was checked, no tensor was replaced: it identifies all of them.
        is_checked = self._checked_state is not None and self._checked_state is subject.watch.observed
        if self._may_be_replaced and not is_checked:
            subject.bindings.refuse_replaced()
            self._checked_state = subject.watch.observed
        self._may_be_replaced = False
        is_known = self._known_program(shape)
        self._last_state = subject.watch.observed
        key = (shape, self._last_state)
        if not is_known:
            # Drop the oldest, as every rank does: lowering is collective, so all must lower again in the same calls.
            while len(self._cache) >= CAPTURES_KEPT:
                self._cache.pop(next(iter(self._cache)))
            self._cache[key] = lower_model(
                subject,
                subject.program(shape),
                self._plan,
                self._placement,
                self.groups.replica,
                cells=self._cell_count,
                in_turn=self._is_cell,
                spills=self._pager is not None,
                updates=self._updates,
            )
            subject.bindings.refuse_released(self._cache[key].names, self.groups.users)
        return self._cache[key]

    def observe(self) -> Hashable:
        """Read the model's Python state, which all runners of the process use until the next call; return it."""
        self._may_be_replaced = True
        return self._subject.watch.observe()

    def known(self, shape: Shape) -> str:
        """Return the digest of the lowered program for a shape; "" for a new shape, "new" for a new module state."""
        self.observe()
        if all(key[0] != shape for key in self._cache):
            return ""
        with contextlib.suppress(RequestError):  # raised again when all ranks lower it, or compare states
            if self._known_program(shape):
                return self._cache[shape, self._subject.watch.observed].digest
        return "new"

    def _known_program(self, shape: Shape) -> bool:
        """Whether the program for a shape, in the state as last observed, is in the cache; captures it if necessary."""
        if (shape, self._subject.watch.observed) in self._cache:
            return True
        program = self._subject.program(shape)  # a capture observes the state again
        current = (shape, self._subject.watch.observed)
        former = next(
            (key for key, lowered in self._cache.items() if key[0] == shape and lowered.program is program), current
        )
        # The new key keeps the old one's position: all ranks must drop the same program as their oldest.
        self._cache = {current if key == former else key: lowered for key, lowered in self._cache.items()}
        return current in self._cache

    def changes(self) -> dict[tuple[str, str], str]:
        """Return the attributes that have changed since the last call: (module, attribute) -> current value."""
        model, places = self._subject.model, changed_since(self._last_state, self._subject.watch.observed)
        return {path: describe_value(model, *path) for path in places}

    def schedule(self, lowered: LoweredModel) -> Schedule:
        """Return the lowered schedule of a training step: every action of every rank of a replica."""
        return self._schedules.training(lowered.boundaries)

    def forwards_first(self, lowered: LoweredModel) -> bool:
        """Whether a training step runs all forwards before all backwards, so that all outputs exist at once."""
        return self._schedules.forwards_first(lowered.boundaries)

    def training_parts(self, micro: Shape, samples: int) -> dict[Key, InputPart]:
        """Return (stage, direction) -> what this runner reads in training of a batch of ``samples``."""
        return self.reader.training_parts(self.lowered(micro), samples)

    def training_input(self, batch: ImageBatch) -> LocalInput:
        """Return what this runner reads of a batch in training."""
        return self._read(batch, self.training_parts(batch.micro, batch.shape[0]))

    def _read(self, batch: ImageBatch, parts: dict[Key, InputPart]) -> LocalInput:
        # A cell reads its box when it computes: the boxes of all cells are as large as the image.
        return LocalInput(batch, parts, {} if self._is_cell else self.reader.read(batch.images, parts))

    def step(self, inputs: LocalInput, labels: torch.Tensor, arrived: Callable[[int], None], over_batch: bool) -> Step:
        """Return the inputs of a training step; collective over all trainers at the first loss over the whole batch.

        Args:
            inputs: result of ``training_input``.
            labels: labels of the whole batch.
            arrived: called with a direction before its forwards; returns when its weights are there.
            over_batch: whether the loss is computed over the whole batch.
        """
        lowered = self.lowered(inputs.batch.micro)
        return self._step(lowered, inputs, self._loss(lowered, labels, over_batch), arrived)

    def train(self, micro: Shape, step: Step, gradients: Gradients, over_batch: bool) -> list[Event]:
        """Run forward and backward of one step; return its events, those of both forwards if each ran twice.

        Args:
            micro: the shape of a micro-batch.
            step: result of ``step``.
            gradients: the reduction of gradients.
            over_batch: whether the loss is computed over the whole batch. Unless all forwards come before all
                backwards, they then run twice: first without graph, only for the output.
        """
        lowered = self.lowered(micro)
        statistics = self._statistics(lowered)
        pipeline = self._pipeline(lowered, statistics, gradients)
        actions = self.schedule(lowered).actions[self.groups.plane.rank]
        before = self._take_outputs(lowered, step) if over_batch and not self.forwards_first(lowered) else []
        pipeline.run(actions, step)
        statistics.finish()
        self._trained = statistics
        return [*before, *pipeline.events]

    def _loss(self, lowered: LoweredModel, labels: torch.Tensor, over_batch: bool) -> StepLoss:
        """Return the loss of a step, with the parameters that it may use itself."""
        subject, plan = self._subject, self._plan
        here = (name for stage, _ in lowered.hosted for name in lowered.names[stage])
        trained, elsewhere = subject.bindings.divided(here, plan.stages > 1)
        function = LossFunction(subject.settings.loss, self._autocasting, self._one_rank, trained, elsewhere)
        targets = uploaded(labels, subject.device)
        return loss_of_step(function, lowered.pick, targets, plan, self.groups, over_batch, lowered.common_leaves)

    def _take_outputs(self, lowered: LoweredModel, step: Step) -> list[Event]:
        """Run all forwards without graph, only to give the loss the batch's output; no buffer or generator changes."""
        devices = [self._subject.device] if self._subject.device.type == "cuda" else []
        draws = any(stage.ranked.drawn for stage in lowered.hosted.values())
        # The forwards with graph, which follow, must draw the same numbers as these.
        with torch.no_grad(), torch.random.fork_rng(devices, enabled=draws):
            pipeline = self._pipeline(lowered, self._statistics(lowered, apart=True), None)
            actions = self._schedules.outputs(lowered.boundaries).actions[self.groups.plane.rank]
            pipeline.run(actions, replace(step, loss=NoLoss(self._subject.device), parameters={}))
        if pipeline.outputs:
            step.loss.take(dict(sorted(pipeline.outputs.items())))
        return pipeline.events

    def publish(self) -> None:
        """Copy the buffers changed by the last step to the model, if this runner has its own."""
        assert self._trained is not None
        self._trained.publish()

    def predict(self, batch: ImageBatch) -> Any:
        """Return the whole output for a batch, equal in every runner of the plan; the model is in evaluation mode."""
        with torch.no_grad():
            lowered, inputs = self._begin_evaluation(batch)
            pipeline = self._pipeline(lowered, None, None)
            step = self._step(lowered, inputs, NoLoss(self._subject.device))
            schedule = self._schedules.prediction(lowered.boundaries, batch.count)
            pipeline.run(schedule.actions[self.groups.plane.rank], step)
            return self.reader.in_format_of(batch.images, self._joined_output(lowered, pipeline, batch.count))

    def explain(self, batch: ImageBatch) -> ExplainedPart:
        """Return the logits, and this runner's part of their contributions; see ``Engine.explain``."""
        lowered, inputs = self._begin_evaluation(batch)
        return join_explanations([self._driver.run(self._explained(lowered, inputs, m)) for m in range(batch.count)])

    def differentiate(self, batch: ImageBatch, use: UseGradient) -> torch.Tensor:
        """Pass this runner's parts of gradients to ``use``; return the logits; see ``Engine.input_gradients``."""
        lowered, inputs = self._begin_evaluation(batch)
        return torch.cat([self._driver.run(self._differentiated(lowered, inputs, m, use)) for m in range(batch.count)])

    def _differentiated(
        self, lowered: LoweredModel, inputs: LocalInput, microbatch: int, use: UseGradient
    ) -> Waits[torch.Tensor]:
        """Pass the image's gradients of one micro-batch to ``use``; return its logits."""
        values = self._subject.bindings.begin(lowered.only, self._part(inputs, (0, 0), microbatch), microbatch)
        memory_of, first = self._memory_of(lowered.only, values), microbatch * inputs.batch.micro[0]
        steps = differentiate(lowered, values, self.groups.stages[0, 0], first, use, memory_of)
        return (yield from self._driver.within(self._autocasting, steps))

    def _explained(self, lowered: LoweredModel, inputs: LocalInput, microbatch: int) -> Waits[ExplainedPart]:
        """Return the explanation of a micro-batch; its pixels are freed once the first layer has used them."""
        values = self._subject.bindings.begin(lowered.only, self._part(inputs, (0, 0), microbatch), microbatch)
        memory_of = self._memory_of(lowered.only, values)
        steps = attribute(lowered, values, self.groups.stages[0, 0], memory_of)
        return (yield from self._driver.within(self._autocasting, steps))

    def _begin_evaluation(self, batch: ImageBatch) -> tuple[LoweredModel, LocalInput]:
        """Return the lowered model, and what this runner reads of the batch."""
        lowered = self.lowered(batch.micro)
        return lowered, self._read(batch, self.reader.prediction_parts(lowered, batch.shape[0]))

    def _pipeline(
        self,
        lowered: LoweredModel,
        statistics: FollowingStatistics | FoldedStatistics | None,
        gradients: Gradients | None,
    ) -> Pipeline:
        """Return what runs one schedule on this rank; without ``gradients`` forwards only, whose outputs it keeps."""
        comm, device, trains, pages = self.groups.plane, self._subject.device, gradients is not None, self._pager
        recomputed = self._recomputed(lowered) if trains else frozenset[Action]()
        return Pipeline(
            lowered,
            groups=self.groups.stages,
            all_replicas=self.groups.all_replicas,
            between_planes=self.groups.between_planes,
            exchange=StageExchange(lowered.boundaries, self._placement, comm, device, moves=pages is not None),
            statistics=statistics,
            gradients=gradients,
            autocasting=self._autocasting,
            recomputes=recomputed.__contains__,
            driver=self._driver,
            memory=None if pages is None else lambda stage, stays: self._memory(stage, stays, recomputes=trains),
        )

    def _recomputed(self, lowered: LoweredModel) -> frozenset[Action]:
        """Return this rank's forwards of a training step that are computed again in backward."""
        if not self._plan.recompute:
            return frozenset()
        in_turn = self._cell_count > 1 or self._pager is not None  # then each forward waits while other cells run
        return self._schedules.recomputed(lowered.boundaries, self.groups.plane.rank, in_turn)

    def _memory(self, stage: HostedStage, stays: LocalValues, recomputes: bool) -> StepMemory:
        """Return the paging callbacks of a micro-batch; the tensors ``stays`` except the image stay in memory."""
        assert self._pager is not None
        if stage not in self._use_orders:
            self._use_orders[stage] = UseOrder(stage.tape)
        image = stage.ranked.program.image
        self._pager.fix(tensor for name, tensor in stays.items() if name != image)
        return PagedSteps(self._pager, self._use_orders[stage], self._autocasting, recomputes)

    def _memory_of(self, stage: HostedStage, values: LocalValues) -> Callable[[Tape], StepMemory]:
        """Return what creates the paging callbacks of a tape in evaluation; all ``values`` but the image stay."""
        pager = self._pager
        if pager is None:
            return lambda tape: AllStays()
        image = stage.ranked.program.image
        pager.fix(tensor for name, tensor in values.items() if name != image)
        return lambda tape: PagedSteps(pager, UseOrder(tape), self._autocasting, recomputes=False)

    def _step(
        self,
        lowered: LoweredModel,
        inputs: LocalInput,
        loss: StepLoss,
        arrived: Callable[[int], None] = lambda direction: None,
    ) -> Step:
        """Return the inputs of one run of the pipeline; ``arrived`` waits for the weights of a direction's stages."""
        plan, subject, trains = self._plan, self._subject, not isinstance(loss, NoLoss)

        def part(key: Key, microbatch: int) -> torch.Tensor | None:
            """Return a stage's part of the image, None if it reads none; wait for its weights, needed next."""
            arrived(direction := key[1])
            if key not in inputs.parts:
                return None
            # Direction 1 has the second half of the micro-batches; its local samples begin with the first of these.
            first = direction * plan.microbatches // plan.directions if trains else 0
            return self._part(inputs, key, microbatch - first, trains)

        def begin(key: Key, microbatch: int, part: torch.Tensor | None) -> LocalValues:
            """Return the values with which a stage's forward begins: its part of the image, weights and buffers."""
            return subject.bindings.begin(lowered.hosted[key], part, microbatch)

        parameters = {key: subject.bindings.parameters(stage) for key, stage in lowered.hosted.items()}
        reads_again = self._pager is None and inputs.batch.is_on(subject.device)
        return Step(part, begin, loss, parameters, reads_again)

    def _part(self, inputs: LocalInput, key: Key, microbatch: int, trains: bool = False) -> torch.Tensor:
        """Return this runner's box of one micro-batch, from the pixels read earlier; a cell reads it only now.

        Args:
            inputs: what this runner reads.
            key: the stage and direction.
            microbatch: index of the micro-batch among those of this direction.
            trains: whether the same images are needed again in backward.
        """
        images, size = inputs.batch.images, inputs.batch.micro[0]
        start = microbatch * size
        if key in inputs.local:
            return inputs.local[key][start : start + size]
        chosen = inputs.parts[key].microbatch(start, size)
        if self._pager is not None and trains and isinstance(images, PixelParts):
            pixels, prepare = self.reader.read_pixels(images, chosen)
            return self._pager.image(pixels, prepare)
        part = self.reader.read(images, {key: chosen}, inputs.counted)[key]
        inputs.counted.add(chosen)  # read again in a recomputed forward, a part is not counted again
        return part if self._pager is None else part.clone()  # memory owned by the caller cannot be spilled

    def _statistics(self, lowered: LoweredModel, apart: bool = False) -> FollowingStatistics | FoldedStatistics:
        """Return the buffers that a step changes; ``apart``: copies, so that the module's own stay as they are."""
        # A cell changes copies, because other cells may still read the old values; without changes none are needed.
        changes = any(stage.ranked.program.mutations for stage in lowered.hosted.values())
        apart = (apart or self._is_cell) and changes
        model, rank = self._subject.model, self.groups.plane.rank
        if self._plan.directions == 1:
            return FollowingStatistics(self._subject.bindings.buffers, apart)
        # Equal positions of the two directions compute the same part of a stage.
        peers = {
            (stage, direction): self._placement.group(stage, 1 - direction)[
                self._placement.group(stage, direction).index(rank)
            ]
            for stage, direction in lowered.hosted
        }
        return FoldedStatistics(model, lowered.hosted, peers, self.groups.plane, self._plan.microbatches, apart)

    def _joined_output(self, lowered: LoweredModel, pipeline: Pipeline, microbatches: int) -> Any:
        """Return the output of all micro-batches together, on every rank of the replica."""
        return output_of_batch(lowered, [self._shared(pipeline.outputs.pop(m, None)) for m in range(microbatches)])

    def _shared(self, leaves: list[Any] | None) -> list[Any]:
        """Return the leaves of an output on every rank of the plane, broadcast from the last stage."""
        if self._placement.stages == 1:
            assert leaves is not None
            return leaves
        root, comm = self._placement.group(self._placement.stages - 1)[0], self.groups.plane
        # Shapes first: a rank without the last stage does not know those of the output.
        description = comm.broadcast_object(described(leaves) if leaves is not None else None, root)
        tensors = undescribed(description, leaves if comm.rank == root else None, self._subject.device)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                comm.broadcast(tensor, root)
        return tensors

    def _autocasting(self) -> Any:
        return autocasting(self._subject.device, self._subject.settings.autocast, cached=self._pager is None)
