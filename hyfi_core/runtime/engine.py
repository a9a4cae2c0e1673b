"""The engine: one classifier trained exactly by many ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hyfi_core.cells.page_forecast import PagedForecast
from hyfi_core.comm.activity import ACTIVITY
from hyfi_core.comm.agreement.agree import CallConsensus, agree
from hyfi_core.comm.agreement.same_weights import SameWeights
from hyfi_core.comm.agreement.weight_watch import WeightWatch
from hyfi_core.comm.base import Communicator
from hyfi_core.cost.machine import MachineModel
from hyfi_core.errors import RequestError
from hyfi_core.lowering.compiling.segment_compiler import SegmentCompiler
from hyfi_core.plan.batch_shapes import BatchShapes, Shape
from hyfi_core.plan.box import Box, hull
from hyfi_core.plan.input_part import InputPart
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.runtime.batch_reader import ImageBatch, Images
from hyfi_core.runtime.calls.attribution import Explanation, gather_explanation
from hyfi_core.runtime.calls.engine_facts import EngineFacts
from hyfi_core.runtime.calls.engine_state import EngineState
from hyfi_core.runtime.calls.gradient_scale import GradientScale
from hyfi_core.runtime.calls.input_gradients import UseGradient
from hyfi_core.runtime.calls.local_use import mark_stale, watch_local_use
from hyfi_core.runtime.calls.paged_call import PagedCall, pixels_of
from hyfi_core.runtime.calls.parameter_hooks import ParameterHooks
from hyfi_core.runtime.calls.replayed_steps import ReplayedSteps
from hyfi_core.runtime.calls.resolved_plan import resolved
from hyfi_core.runtime.calls.runners import Runners
from hyfi_core.runtime.calls.same_pixels import SamePixels
from hyfi_core.runtime.executor import evaluating
from hyfi_core.runtime.gradients import GradientsOfCells, StepGradients
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.losses.step_loss import ComputedLosses
from hyfi_core.runtime.losses.training_loss import TrainingLoss
from hyfi_core.runtime.lowered_model import LoweredModel
from hyfi_core.runtime.mirror import Mirrors
from hyfi_core.runtime.ownership import (
    ParameterOwnership,
    made_optimizer,
    refuse_shared_memory,
    used_stages,
)
from hyfi_core.runtime.pipeline import Event, Step
from hyfi_core.runtime.settings import EngineSettings
from hyfi_core.runtime.statistics import ReplicaBuffers, StageTensors, unsaved_buffers
from hyfi_core.runtime.subject import CAPTURES_KEPT, RandomKey, Subject
from hyfi_core.schedule.action import Action


class Engine(EngineState, EngineFacts):
    """A model distributed over ranks; created by ``parallelize``.

    All methods are collective over the ranks of the plan.

    Attributes:
        plan: the plan, with "auto" cuts replaced by names.
        device: device of the model.
        optimizer: this rank's ``torch.optim.Optimizer``; learning-rate schedulers take it.
        random: the key of random operators, the same on all ranks of a replica.
        events: actions of this rank in the last step: (action, begin, end) in seconds; with cells those of the first;
            none if the step was repeated as CUDA graphs.
    """

    def __init__(
        self,
        model: nn.Module,
        shape: Shape,
        plan: ParallelPlan,
        comm: Communicator,
        settings: EngineSettings,
        compiler: SegmentCompiler | None = None,
    ) -> None:
        self._model = model
        # Before the first capture, because hooks are part of the state by which captures are known.
        watch_local_use(model, plan.stages)
        # The key is an int64 tensor; torch's seeds have 64 bits without a sign.
        self.random = RandomKey(torch.initial_seed() & (2**63 - 1))
        shapes = self._shapes = BatchShapes.of(plan, shape)
        subject = Subject.of(model, settings, shapes, self.random, compiler)
        self.device, bindings = subject.device, subject.bindings
        trains = model.training or settings.optimizer is not None
        plan = resolved(plan, subject, comm, self.device, trains)
        self.plan = plan
        self._subject = replace(subject, channels_last=subject.lays_channels_last(plan.by_cells().grids))
        self._groups = Groups(comm, plan, Placement.of(plan))
        replica_index = self._groups.replica_index
        self._pixels = SamePixels(comm, replica_index)
        self._loss = TrainingLoss(self._subject, plan, self._groups)
        self._shared: list[tuple[LoweredModel, StepGradients, ReplicaBuffers]] = []
        # Masks are computed part by part: ranks with other seeds would disagree on the pixels that they share.
        self.random.seed = int(comm.broadcast_object(self.random.seed))
        self.random.first, self.random.share = replica_index * plan.microbatches, plan.share_of(replica_index)
        self.events: list[tuple[Action, float, float]] = []
        self._training_call = PagedCall(shapes.micro, trains=True)
        self._runners = Runners(self._subject, plan, comm, self._groups)
        self._paging = self._runners.paging
        counts = [comm.counts for each in (self._groups, *self._runners.groups) for comm in each.counted()]
        self._replayed = ReplayedSteps(self._subject, plan.ranks, settings.cuda_graphs, counts)
        lowered = self._lowered()  # captures the model, or refuses it
        if settings.verify:
            agree(comm, lambda: self._subject.verify() if comm.rank == 0 else None)
        if plan.stages > 1:
            agree(comm, lambda: refuse_shared_memory(model, lowered, self._groups))
        # After the comparison, for which rank 0 needs values of all weights: ``share`` may release them.
        bindings.share(used_stages(model, lowered), self._groups, settings.release, settings.weights, self.device)
        self._ownership = ParameterOwnership(model, lowered, self._groups, self.device)
        owner, updated_on = self._ownership.owner, self._ownership.updated_on() if plan.stages > 1 else {}
        self._stage_tensors = StageTensors(model, self._groups, owner, updated_on)
        self.unsaved = unsaved_buffers(model, lowered)
        self._weight_elsewhere = self._ownership.missing() if plan.stages > 1 else None
        self._mirrors = Mirrors(model, self._groups, plan.mirror == "point_to_point")
        self._watch = WeightWatch(model, self._mirrors.arriving, plan.stages > 1)
        weights = SameWeights(self._watch, self._ownership.held(), self.settle, self._resend)
        changes, replica = self._runners[0].changes, self._groups.replica
        has_loss = any(stage == plan.stages - 1 for stage, _ in self._groups.stages)
        unmixed = self.device.type if settings.autocast is None else None  # where the caller must not use autocast
        self._consensus = CallConsensus(
            model, comm, replica, changes, weights, settings.loss, bool(plan.shares), plan.stages, unmixed, has_loss
        )
        self._scale = GradientScale(self._ownership.optimized() if plan.stages > 1 else ())
        self._mirrors.choose(lowered, self.settle)
        self._optimizer = made_optimizer(settings.optimizer, self._ownership.optimized(), plan.stages > 1)
        self._input_parts = self._runners.training_parts(shapes)

    @property
    def input_parts(self) -> tuple[InputPart, ...]:
        """The boxes and samples that this rank reads in training; empty if it reads none."""
        return self._input_parts

    @property
    def input_box(self) -> Box:
        """The box of the image that this rank reads: its part of the first map with halo; may be empty.

        With two directions it is that of the first; with cells the smallest box that covers those of all cells.
        """
        if self.plan.cells is not None:
            return hull(part.box for part in self._input_parts if not part.box.empty)
        return self._input_parts[0].box if self._input_parts else Box(0, 0, 0, 0)

    def predict(self, images: Images) -> Any:
        """Return the model's output for a batch in evaluation mode, the same on every rank.

        Args:
            images: the whole batch ``(B, C, H, W)``, a callable that returns ``(B, C, h, w)`` for a box of it, or an
                object with ``read(box, first, stop)``. Each cell reads its own box in its turn.

        Raises:
            RequestError: there are several micro-batches, and the output has a number that is computed from all images.
        """
        self._use_new_segments()
        self._replayed.release()
        # Entered first: the flags of the modules decide which captured program is used.
        with evaluating(self._model, self.device):
            self._groups.reset_traffic(*self._runners.groups)
            batch = self._evaluation_batch("predict", images)
            self.reserve(batch.micro, trains=False)
            return self._runners.each(lambda runner: runner.predict(batch))[0]

    def attribute(self, images: Images) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (logits ``(B, K)``, contributions ``(B, K, h, w)``) float32, the same on every rank; see `explain`.

        Raises:
            RequestError: as `explain`.
        """
        return self.explain(images)[:2]

    def explain(self, images: Images) -> Explanation:
        """Return the logits and their contributions, the same on every rank.

        A contribution is activation times the gradient of the logit, summed over the channels of the last map before
        space is reduced. For a linear head behind a mean or maximum, contributions plus the bias are the logit.

        Raises:
            NoMapError: the logits are not reduced from a map.
            RequestError: the model's output is not one tensor of logits, or the plan has several stages.
        """
        if self.plan.stages > 1:
            raise RequestError(
                f"contributions need a plan of one stage, not {self.plan.stages}; use grids=((rows, columns),), "
                f"interleave=1"
            )
        self._use_new_segments()
        self._replayed.release()
        with evaluating(self._model, self.device):
            batch = self._evaluation_batch("attribute", images)
            self.reserve(batch.micro, trains=False)
            parts, stage = self._runners.each(lambda runner: runner.explain(batch)), self._groups.stages[0, 0]
            return gather_explanation(parts, self.plan.cell_grid or (1, 1), stage)

    def input_gradients(self, images: Images, use: UseGradient) -> torch.Tensor:
        """Pass this rank's gradients of the image to ``use``; return the logits ``(B, K)``, the same on every rank.

        ``use`` is called for each output, micro-batch and cell. Parts of ranks and cells overlap where they read the
        same pixels; there the gradient is the sum of theirs. Memory: that of a training step without
        gradients of weights.

        Raises:
            RequestError: as ``explain``; the model needs no map.
        """
        if self.plan.stages > 1:
            raise RequestError(
                f"gradients of the image need a plan of one stage, not {self.plan.stages}; use "
                f"grids=((rows, columns),), interleave=1"
            )
        self._replayed.release()
        with evaluating(self._model, self.device):
            batch = self._evaluation_batch("input_gradients", images)
            if self._paging is not None:
                call = PagedCall(batch.micro, trains=True)
                self._paging.begin(call, lambda: self._forecasts(call), 0)
            return self._runners.each(lambda runner: runner.differentiate(batch, use))[0]

    def gradient_bytes(self) -> int | None:
        """Return the bytes of the maps that ``input_gradients`` keeps of a micro-batch; None if they may be spilled."""
        if self._paging is not None:
            return None
        with evaluating(self._model, self.device):
            self._runners[0].observe()
            forecasts = self._forecasts(PagedCall(self._shapes.micro, trains=True))
            return sum(each.kept_bytes + each.stays_bytes + each.recomputed_bytes for each in forecasts)

    def accumulate(self, images: Images, labels: torch.Tensor) -> float:
        """Run forward and backward; this call's gradient is reduced and added to earlier ones.

        Args:
            images: the replica's whole batch; see ``predict``. Only ``input_parts`` of it are read.
            labels: labels of the whole batch, first dim B.

        Returns:
            The loss of the whole batch, of all micro-batches and replicas, the same on every rank.

        Raises:
            RequestError: the micro-batches would be unequal, or the batch has the wrong size for this replica.
        """
        return float(self.accumulate_unread(images, labels))

    def accumulate_unread(self, images: Images, labels: torch.Tensor) -> torch.Tensor:
        """Like ``accumulate``; the loss stays on the device, float64 without dims, and the host does not wait."""
        self._use_new_segments()
        self._groups.reset_traffic(*self._runners.groups)
        batch = self._runners[0].reader.training_batch(images, labels)
        ACTIVITY.begin_step()
        ACTIVITY.action = "comparing this call"
        # Before lowering, which is collective: a rank with another call would wait for messages that never come.
        self._consensus.check_training(batch.shape, self._runners[0].known(batch.micro), labels, self._optimizer)
        lowered = self._lowered(batch.micro)
        self._send_changed_tensors(lowered)
        over_batch = self._loss.over_batch(lowered, labels, self._runners[0].forwards_first(lowered))
        inputs = dict(self._runners.each(lambda runner: (runner, runner.training_input(batch))))
        self._pixels.check(inputs[self._runners[0]])
        self._mirrors.choose(lowered, self.settle)
        gradients, buffers = self._shared_by(lowered)
        sink = gradients if self._runners.cells == 1 else GradientsOfCells(gradients, self._runners.cells)
        hooks = ParameterHooks(self._subject.bindings.parameters_once, self.plan.microbatches * self.plan.replicas)
        # Before the update already: forwards change the buffers of this rank's own stages only.
        mark_stale(self._model, self._weight_elsewhere)
        with self._watch.changing(noticed=True), hooks:
            gradients.begin()
            self.reserve(batch.micro, pixels=pixels_of(images))
            arrived = self._mirrors.arrived

            def train(steps: list[Step]) -> list[Event]:
                step_of = dict(zip(self._runners, steps, strict=True))
                events = self._runners.each(lambda runner: runner.train(batch.micro, step_of[runner], sink, over_batch))
                # Only now: until the last cell has run, some may still read the old buffers.
                self._runners[0].publish()
                return events[0]

            steps, self.events = self._replayed.run(
                lowered,
                lambda: _sharing_losses(
                    self._runners.each(lambda runner: runner.step(inputs[runner], labels, arrived, over_batch))
                ),
                train,
                repeats=self._paging is None and not over_batch,
            )
            gradients.finish(hooks, self._loss.unreached(lowered, [step.loss for step in steps]))
            # First replicas take over the buffers of replica 0: stages must send each other the final values.
            buffers.take_over()
            if self.plan.stages > 1:
                self._stage_tensors.changed(lowered)
        # After the reduction: what changes from here to ``update`` is the caller's doing.
        self._scale.remember_gradients()
        ACTIVITY.action = None
        self.random.step += 1
        return self._loss.total([step.loss for step in steps], over_batch)

    def train_step(self, images: Images, labels: torch.Tensor) -> float:
        """Call ``accumulate`` and ``update``; return the loss."""
        loss = self.accumulate_unread(images, labels)
        self.update_unread()
        return float(loss)  # read last: the host starts the update while the device computes

    def describe(self, machine: MachineModel | None = None) -> str:
        """Return the plan as text, with forwards that run twice, maps that ranks gather, and what is spilled."""
        lines = self._loss.describe(self._runners[0].forwards_first(self._lowered()))
        lines += [f"gathered on every rank: {line}" for line in self._lowered().gathered]  # in the model's current mode
        if self._paging is not None:
            call = self._training_call
            lines += call.described(self._paging, self._forecasts(call), self._subject, self.plan, machine)
        return "\n".join([self.plan.describe().rstrip("\n"), *lines])

    def reserve(self, micro: Shape | None = None, trains: bool = True, pixels: torch.dtype | None = None) -> int | None:
        """Reserve memory and disk for the maps of a call, a training step by default; refuse too little of either.

        The arguments are those of ``PagedCall``.

        Returns:
            The bytes that will be spilled; None without ``plan.spill``.
        """
        if self._paging is None:
            return None
        self._runners[0].observe()  # forecasts are for the model's present state, such as its mode
        call = PagedCall(micro or self._shapes.micro, trains, pixels)
        self._training_call = call if trains else self._training_call  # the one that ``describe`` shows
        return self._paging.begin(
            call, lambda: self._forecasts(call), call.state_bytes_to_come(self._model, self._optimizer)
        )

    def _use_new_segments(self) -> None:
        """Begin to use the segments that have been compiled since the last call."""
        if self._subject.compiler is not None:
            self._subject.compiler.change_over()

    def _forecasts(self, call: PagedCall) -> list[PagedForecast]:
        """Return the forecasts of the memory of a call's maps, for every stage in every cell."""
        of_cells = self._runners.each(lambda runner: runner.lowered(call.micro))
        return call.forecasts(self._subject, self.plan, of_cells)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse ``copy.deepcopy`` and ``pickle``."""
        raise RequestError(
            "an engine cannot be copied or pickled: it has the connections of its rank; copy the model, or save the "
            "state with engine.save(folder) and load it into another engine with engine.load(folder)"
        )

    def _lowered(self, micro: Shape | None = None) -> LoweredModel:
        """Return the lowered model for micro-batches of a shape.

        Without ``micro``, outside of a call, the usual shape and the model's present mode count.
        """
        if micro is None:
            self._runners[0].observe()
        return self._runners.each(lambda runner: runner.lowered(micro or self._shapes.micro))[0]

    def _evaluation_batch(self, call: str, images: Images) -> ImageBatch:
        """Return a batch to predict, on whose shape all ranks agree."""
        batch = self._runners[0].reader.evaluation_batch(images)
        self._consensus.check_evaluation(call, batch.shape, self._runners[0].known(batch.micro))
        self.settle()  # a stage may read weights that this rank otherwise uses in direction 1 only
        self._send_changed_tensors(self._lowered(batch.micro))
        return batch

    def _send_changed_tensors(self, lowered: LoweredModel) -> None:
        """Send the tensors that a stage has changed to the ranks of other stages that read them."""
        missing = self._stage_tensors.missing(lowered) if self.plan.stages > 1 else []
        if missing:
            with self._watch.changing():
                self._stage_tensors.send(missing)

    def _resend(self) -> None:
        """Send weights of direction 0 again, where they have overwritten a change in direction 1."""
        with self._watch.changing():
            self._mirrors.send_weights()
            self._mirrors.settle()

    def _shared_by(self, lowered: LoweredModel) -> tuple[StepGradients, ReplicaBuffers]:
        """Return what reduces a lowered model's gradients and exchanges its buffers, created at its first step."""
        shared = next(((gradients, buffers) for owner, gradients, buffers in self._shared if owner is lowered), None)
        if shared is None:
            self._ownership.check_trained(lowered)
            model, groups = self._model, self._groups
            gradients = StepGradients(model, lowered, groups, self.plan, self._mirrors.current)
            shared = gradients, ReplicaBuffers(model, lowered, groups, self.plan.replicas)
            self.unsaved |= unsaved_buffers(model, lowered)
            # The oldest goes, as in the cache of runners: all ranks must create the groups of a model at the same call.
            self._shared = [*self._shared[1 - CAPTURES_KEPT :], (lowered, *shared)]
        return shared


def _sharing_losses(steps: list[Step]) -> list[Step]:
    """Return the steps of this process's cells, which now share each loss: it may have state, so it runs once."""
    computed = ComputedLosses(len(steps))
    for step in steps:
        step.loss.computed = computed
    return steps
