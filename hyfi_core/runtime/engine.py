"""The engine: one classifier trained exactly by many ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hyfi_core.capture.leftovers import NoTracedValues
from hyfi_core.capture.module_state import module_state
from hyfi_core.comm.activity import ACTIVITY
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.runtime.attribution import Explanation, attribute
from hyfi_core.runtime.backward import Values
from hyfi_core.runtime.batch_reader import Images, InputPart, Reader, check_labels
from hyfi_core.runtime.bindings import Bindings, RandomKey
from hyfi_core.runtime.compiled import Compiled, compile_model, with_named_cuts
from hyfi_core.runtime.consensus import CallConsensus
from hyfi_core.runtime.executor import autocasting, evaluating
from hyfi_core.runtime.gradients import StepGradients, clip
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.mirror import Mirror
from hyfi_core.runtime.optimizer_state import made_optimizer, optimizer_state, restricted
from hyfi_core.runtime.ownership import ParameterOwnership
from hyfi_core.runtime.pipeline import Key, Pipeline, Step
from hyfi_core.runtime.predictor import Predictor
from hyfi_core.runtime.stage_exchange import StageExchange
from hyfi_core.runtime.statistics import FoldedStatistics, FollowingStatistics
from hyfi_core.schedule.action import Action, Schedule
from hyfi_core.schedule.generate import generate
from hyfi_core.schedule.lower import lower
from hyfi_core.schedule.simulate import validate

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_CAPTURES_KEPT = 16
"""Programs for other shapes and states of the module; the oldest goes first."""


class Engine:
    """A model spread over ranks; made by ``parallelize``. All ranks of the plan call its methods together.

    Attributes:
        plan: how the model is spread; its cuts are names, also where "auto" was asked for.
        optimizer: this rank's ``torch.optim.Optimizer``; learning-rate schedulers take it.
        random: what dropout and its like are keyed by, the same on all ranks of a replica.
        events: what this rank did in the last step: (action, begin, end) in seconds of one clock.
    """

    def __init__(
        self,
        model: nn.Module,
        shape: tuple[int, int, int, int],
        plan: ParallelPlan,
        comm: Communicator,
        loss: Loss,
        optimizer: OptimizerFactory | None,
        output: Callable[[Any], Any] | None,
        autocast: torch.dtype | None,
    ) -> None:
        self._model = model
        self._shape = shape
        self._loss = loss
        self._output = output
        self._autocast = autocast
        self._device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        self._dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        micro = (shape[0] // plan.microbatches, *shape[1:])
        widest = (max(plan.shares or shape[:1]) // plan.microbatches, *shape[1:])  # all replicas are cut alike
        self.plan = plan = with_named_cuts(model, widest, self._dtype, plan)
        self._placement = Placement.of(plan)
        self._groups = Groups(comm, plan, self._placement)
        self._reader = Reader(plan, shape, self._groups, self._device, self._dtype)
        self._cache: dict[Any, Compiled] = {}
        self._gradients: dict[int, StepGradients] = {}
        self._schedules: dict[tuple[tuple[int, int], ...], Schedule] = {}
        self._consensus = CallConsensus(model, comm, self._groups.replica)
        seed = int(comm.broadcast_object(torch.initial_seed() & (2**63 - 1)))
        self.random = RandomKey(seed, first=self._groups.index * plan.microbatches, share=self._share())
        self._bindings = Bindings(model, self.random)
        self.events: list[tuple[Action, float, float]] = []
        # Captures the model: what cannot run is refused here.
        compiled = self._compiled(micro)
        for tensor in (*model.parameters(), *model.buffers()):
            comm.broadcast(tensor.data)
        self._ownership = ParameterOwnership(model, compiled, self._groups)
        self._mirrors: dict[frozenset[str], Mirror] = {}
        self._mirror: Mirror | None = None
        self._choose_mirror(compiled)
        self._optimizer = made_optimizer(optimizer, self._ownership.optimized()) if optimizer is not None else None
        self._input_parts = tuple(self._reader.training_parts(compiled, shape[0]).values())

    # -- what a user calls

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """This rank's optimiser, of the parameters of its stages.

        Raises:
            RequestError: the engine was made without one.
        """
        if self._optimizer is None:
            raise RequestError("this engine has no optimizer; pass parallelize(..., optimizer=lambda params: ...)")
        return self._optimizer

    @property
    def input_parts(self) -> tuple[InputPart, ...]:
        """The boxes of the image that this rank asks for in training, and of which samples; none if it reads none."""
        return self._input_parts

    @property
    def input_box(self) -> Box:
        """The first of these boxes: the rank's part of the first map, halo included, within the image; may be empty."""
        return self._input_parts[0].box if self._input_parts else Box(0, 0, 0, 0)

    def predict(self, images: Images) -> Any:
        """Return the answer for a batch in evaluation mode, the same on every rank.

        Args:
            images: the whole batch ``(B, C, H, W)``, a callable that returns ``(B, C, h, w)`` for a box of it, or an
                object with ``read(box, first, stop)``.
        """
        with self._evaluating(), torch.no_grad():
            self._groups.reset_traffic()
            shape = self._reader.batch_shape(images)
            micro = self._reader.micro_shape(shape)
            self._consensus.check_evaluation("predict", shape)
            compiled = self._compiled(micro)
            local = self._reader.read(images, self._reader.prediction_parts(compiled, shape[0]))
            predictor = Predictor(
                compiled, self._groups, self._placement, self._exchange(compiled), self._bindings.begin
            )
            return predictor.run(local, shape[0], micro[0])

    def attribute(self, images: Images) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (logits ``(B, K)``, contributions ``(B, K, h, w)``) float32, the same on every rank; see `explain`.

        Raises:
            RequestError: as `explain`.
        """
        return self.explain(images)[:2]

    def explain(self, images: Images) -> Explanation:
        """Return the logits and where they come from, the same on every rank.

        A contribution is activation times the gradient of the logit, summed over the channels of the last map before
        space is reduced. For a linear head behind a mean or maximum, contributions plus the bias are the logit.

        Raises:
            RequestError: the model's answer is not one tensor of logits reduced from a map, or the plan has stages.
        """
        if self.plan.stages > 1:
            raise RequestError(
                f"contributions need a plan of one stage, this one has {self.plan.stages}; use grids=((rows, columns),)"
            )
        with self._evaluating():
            shape = self._reader.batch_shape(images)
            micro = self._reader.micro_shape(shape)
            self._consensus.check_evaluation("attribute", shape)
            compiled = self._compiled(micro)
            local = self._reader.read(images, self._reader.prediction_parts(compiled, shape[0]))[0, 0]
            pieces = [
                attribute(compiled, self._bindings.begin(compiled.only, p, m), self._groups.stages[0, 0])
                for m, p in enumerate(local.split(micro[0]))
            ]
        positions = [piece.positions for piece in pieces if piece.positions is not None]
        return Explanation(
            torch.cat([piece.logits for piece in pieces]),
            torch.cat([piece.contributions for piece in pieces]),
            torch.cat(positions) if len(positions) == len(pieces) else None,
        )

    def accumulate(self, images: Images, labels: torch.Tensor) -> float:
        """Run forward and backward; this call's gradient is reduced and added to what is there.

        Args:
            images: the replica's whole batch; see ``predict``. Only ``input_parts`` of it are read.
            labels: of the whole batch, first dim B.

        Returns:
            The loss: mean over micro-batches and replicas (over samples, with ``plan.shares``), the same on every rank.

        Raises:
            RequestError: the micro-batches would be unequal, or the batch is not this replica's share.
        """
        self._groups.reset_traffic()
        shape = self._reader.batch_shape(images)
        micro = self._reader.micro_shape(shape, strict=True)
        check_labels(labels, shape[0])
        self._consensus.check_training(shape)
        compiled = self._compiled(micro)
        local = self._reader.read(images, self._reader.training_parts(compiled, shape[0]))
        self._choose_mirror(compiled)
        gradients = self._gradients_of(compiled)
        statistics = self._statistics(compiled)
        pipeline = Pipeline(
            compiled,
            self._groups.stages,
            self._groups.copies,
            self._exchange(compiled),
            statistics,
            gradients,
            self._autocasting,
            self.plan.recomputes,
        )
        ACTIVITY.step += 1
        gradients.begin()
        pipeline.run(self._actions(compiled), self._step(compiled, local, labels.to(self._device), micro[0]))
        statistics.finish()
        gradients.finish()
        ACTIVITY.action = None
        self.events = pipeline.events
        self.random.step += 1
        return self._shared(pipeline)

    def update(self, max_norm: float | None = None) -> None:
        """Clip gradients to a global norm, let the optimiser step, and forget the gradients."""
        if max_norm is not None:
            owned, alone = self._ownership.optimized(), self.plan.stages == 1
            counted = owned if alone else self._ownership.counted()
            clip(owned, counted, max_norm, None if alone else self._groups.replica)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self._mirror is not None:
            self._mirror.send_weights()

    def train_step(self, images: Images, labels: torch.Tensor) -> float:
        """``accumulate`` and ``update``; the loss."""
        loss = self.accumulate(images, labels)
        self.update()
        return loss

    def gather_gradients(self) -> dict[str, torch.Tensor] | None:
        """Return copies of all gradients under the user's names on rank 0, None elsewhere; what is unused has none."""
        return self._ownership.gather_gradients()

    def gather_state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return a copy of the user's model's own ``state_dict`` on rank 0, None elsewhere."""
        self.settle()
        return self._ownership.gather_state_dict()

    def owned_state(self) -> dict[str, torch.Tensor]:
        """Return the entries of the user's ``state_dict`` that this rank answers for: every entry is one rank's.

        The tensors are the model's own, not copies.
        """
        state = self._model.state_dict()
        return {name: state[name] for name in self._ownership.owned_names()}

    def owned_optimizer(self) -> dict[str, Any]:
        """Return the optimiser's state of those parameters, by name; see ``optimizer_state``."""
        owned = set(self._ownership.owned_names())
        return restricted(optimizer_state(self.optimizer, self._model.named_parameters()), owned)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over weights and buffers from such a dict, on every rank."""
        self.settle()
        self._model.load_state_dict(state)

    def traffic(self) -> dict[str, dict[str, int]]:
        """Return what this rank sent in the last step: messages and bytes by kind."""
        return self._groups.traffic()

    def seconds(self) -> dict[str, float]:
        """Return how long this rank waited for messages in the last step, by kind: ``halo``, ``stage``, ``reduce``."""
        return self._groups.seconds()

    def settle(self) -> None:
        """Return when weights that are on their way to this rank have arrived; then they may be read or changed."""
        if self._mirror is not None:
            self._mirror.settle()

    def schedule(self) -> Schedule:
        """Return the lowered schedule of a training step: every action of every rank of a replica."""
        return self._schedule(self._compiled(self._reader.micro_shape(self._shape)))

    # -- how it is done

    def _choose_mirror(self, compiled: Compiled) -> None:
        """Take the mirror of the parameters that are trained now; weights in transit arrive first."""
        if self.plan.mirror != "point_to_point":
            return
        if compiled.trained not in self._mirrors:
            named = dict(self._model.named_parameters(remove_duplicate=False))
            stages = [
                list({id(named[n]): named[n] for n in names if n in compiled.trained}.values())
                for names in compiled.parameters
            ]
            self._mirrors[compiled.trained] = Mirror(self._placement, self._groups.replica, stages)
        if self._mirror is not self._mirrors[compiled.trained]:
            self.settle()
            self._mirror = self._mirrors[compiled.trained]

    def _step(self, compiled: Compiled, local: dict[Key, torch.Tensor], labels: torch.Tensor, size: int) -> Step:
        count = self.plan.microbatches
        parts = float(count / self.plan.weight(self._groups.index)) if self.plan.shares else count
        first = {direction: direction * count // self.plan.directions for direction in range(self.plan.directions)}
        targets = labels.split(size)

        def begin(key: Key, microbatch: int) -> Values:
            if key[1] == 1 and self._mirror is not None:
                self._mirror.settle()
            part = None
            if key in local:
                start = (microbatch - first[key[1]]) * size
                part = local[key][start : start + size]
            return self._bindings.begin(compiled.hosted[key], part, microbatch)

        def loss(answer: Any, microbatch: int) -> torch.Tensor:
            with NoTracedValues():
                value = self._loss(answer, targets[microbatch])
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                given = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"the value {value!r}"
                raise RequestError(f"the loss has {given}; give one number (a tensor), a mean over its samples")
            return value / parts

        parameters = {key: self._bindings.parameters(stage) for key, stage in compiled.hosted.items()}
        return Step(begin, loss, parameters)

    def _exchange(self, compiled: Compiled) -> StageExchange:
        return StageExchange(compiled.boundaries, self._placement, self._groups.replica, self._device)

    def _statistics(self, compiled: Compiled) -> FollowingStatistics | FoldedStatistics:
        if self.plan.directions == 1:
            return FollowingStatistics(self._model)
        rank = self._groups.replica.rank
        peers = {
            (stage, direction): self._placement.group(stage, 1 - direction)[
                self._placement.group(stage, direction).index(rank)
            ]
            for stage, direction in compiled.hosted
        }
        return FoldedStatistics(self._model, compiled.hosted, peers, self._groups.replica, self.plan.microbatches)

    def _gradients_of(self, compiled: Compiled) -> StepGradients:
        if id(compiled) not in self._gradients:
            self._gradients[id(compiled)] = StepGradients(self._model, compiled, self._groups, self.plan, self._mirror)
        return self._gradients[id(compiled)]

    def _schedule(self, compiled: Compiled) -> Schedule:
        edges = tuple(compiled.boundaries)
        if edges not in self._schedules:
            bare = generate(self.plan, self._placement)
            lowered = lower(bare, self._placement, edges, mirror=self.plan.mirror)
            validate(lowered, self._placement, edges, mirror=self.plan.mirror)  # dry, before any rank can wait for ever
            self._schedules[edges] = lowered
        return self._schedules[edges]

    def _actions(self, compiled: Compiled) -> tuple[Action, ...]:
        return self._schedule(compiled).actions[self._groups.replica.rank]

    def _compiled(self, shape: tuple[int, int, int, int]) -> Compiled:
        self._bindings.refuse_replaced()
        key = (shape, module_state(self._model))
        if key not in self._cache:
            while len(self._cache) >= _CAPTURES_KEPT:
                self._gradients.pop(id(self._cache.pop(next(iter(self._cache)))), None)
            self._cache[key] = compile_model(
                self._model, shape, self._dtype, self.plan, self._groups.replica, self._output, self._autocast
            )
        return self._cache[key]

    def _shared(self, pipeline: Pipeline) -> float:
        """Return the loss: a sum over the last stages of both directions, a mean over replicas that weigh the same."""
        if self.plan.stages * self.plan.directions * self.plan.replicas == 1:
            return float(pipeline.loss)
        total = pipeline.share.to(self._device)
        self._groups.all.of("reduce").all_reduce(total)
        return float(total) / self.plan.mean_over

    def _share(self) -> tuple[int, int] | None:
        """Return (samples of a whole micro-batch before this replica's, all of them) where replicas share it."""
        shares, count = self.plan.shares, self.plan.microbatches
        return (sum(shares[: self._groups.index]) // count, sum(shares) // count) if shares else None

    def _autocasting(self) -> Any:
        return autocasting(self._device, self._autocast)

    def _evaluating(self) -> Any:
        return evaluating(self._model, self._device, self._autocast)
