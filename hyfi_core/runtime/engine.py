"""The engine: one classifier trained exactly by many ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.graph.program import KEY, Ref
from hyfi_core.plan.box import Box
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.attribution import attribute
from hyfi_core.runtime.compiled import Compiled, compile_model
from hyfi_core.runtime.executor import Executor, Values
from hyfi_core.runtime.gradients import add_back, reduce_shares, set_aside
from hyfi_core.runtime.random_key import RandomKey

Images = torch.Tensor | Callable[[Box], torch.Tensor]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Engine:
    """A model spread over ranks; made by ``parallelize``. All ranks of the plan call its methods together.

    Attributes:
        plan: how the model is spread.
        optimizer: this rank's ``torch.optim.Optimizer``; learning-rate schedulers take it.
        random: what dropout and its like are keyed by, the same on all ranks of a replica.
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
        self.plan = plan
        self._model = model
        self._shape = shape
        self._loss = loss
        self._output = output
        self._autocast = autocast
        self._all = CountedCommunicator(comm)
        replica = comm.split(comm.rank // plan.ranks_per_replica, comm.rank)
        assert replica is not None
        self._stage = CountedCommunicator(replica)
        self._cache: dict[Any, Compiled] = {}
        self._device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        self._dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self._trained = [p for p in model.parameters() if p.requires_grad]
        for tensor in (*model.parameters(), *model.buffers()):
            comm.broadcast(tensor.data)
        seed = int(comm.broadcast_object(torch.initial_seed() & (2**63 - 1)))
        self.random = RandomKey(seed, first=comm.rank // plan.ranks_per_replica * plan.microbatches)
        self._optimizer = optimizer(self._trained) if optimizer is not None else None
        # Captures the model: what cannot run is refused here.
        self._input_box = self._compiled(self._micro_shape(shape[0])).ranked.read_box

    # -- what a user calls

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """This rank's optimiser.

        Raises:
            RequestError: the engine was made without one.
        """
        if self._optimizer is None:
            raise RequestError("this engine has no optimizer; pass parallelize(..., optimizer=lambda params: ...)")
        return self._optimizer

    @property
    def input_box(self) -> Box:
        """The box of the image that this rank asks for: its part of the first map, halo included, within the image."""
        return self._input_box

    def predict(self, images: Images) -> Any:
        """Return the answer for a batch in evaluation mode, the same on every rank.

        Args:
            images: the whole batch ``(B, C, H, W)``, or a callable that returns ``(B, C, h, w)`` for a box of it.
        """
        with self._evaluating(), torch.no_grad():
            self._reset_traffic()
            local, shape = self._local(images)
            answers = []
            compiled = self._compiled(self._micro_shape(shape[0], shape))
            for index, part in enumerate(local.split(self._micro_shape(shape[0], shape)[0])):
                values = self._start(compiled, part, index)
                Executor(compiled.tape, self._stage).forward(values, record=False)
                answers.append(compiled.pick(compiled.leaves(values)))
            return _joined(answers)

    def attribute(self, images: Images) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (logits ``(B, K)``, contributions ``(B, K, h, w)`` float32), the same on every rank.

        A contribution is activation times the gradient of the logit, summed over the channels of the last map before
        space is reduced. For a linear head behind a mean or maximum, contributions plus the bias are the logit.

        Raises:
            RequestError: the model's answer is not one tensor of logits reduced from a map.
        """
        with self._evaluating():
            local, shape = self._local(images)
            compiled = self._compiled(self._micro_shape(shape[0], shape))
            pieces = [
                attribute(compiled, self._start(compiled, p), self._stage)
                for p in local.split(self._micro_shape(shape[0], shape)[0])
            ]
        return torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces])

    def accumulate(self, images: Images, labels: torch.Tensor) -> float:
        """Run forward and backward; this call's gradient is reduced and added to what is there.

        Args:
            images: the replica's whole batch, or a callable that returns any box of it.
            labels: of the whole batch, first dim B.

        Returns:
            The loss: mean over micro-batches and replicas, the same on every rank.

        Raises:
            RequestError: the micro-batches would be unequal.
        """
        self._reset_traffic()
        local, shape = self._local(images)
        micro = self._micro_shape(shape[0], shape, strict=True)
        compiled = self._compiled(micro)
        parameters = self._parameters(compiled)
        active = [p for name, p in parameters.items() if name in compiled.tape.active]
        active = list({id(p): p for p in active}.values())
        kept = set_aside(self._trained)
        labels = labels.to(self._device)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, (part, targets) in enumerate(zip(local.split(micro[0]), labels.split(micro[0]), strict=True)):
            values = self._start(compiled, part, index)
            total += self._micro_step(compiled, values, targets, parameters, shape[0] // micro[0])
        self.random.step += 1
        self._all.kind = "reduce"
        reduce_shares(active, self._all, 1.0 / self.plan.replicas)
        add_back(self._trained, kept)
        return self._mean_over_replicas(total)

    def update(self, max_norm: float | None = None) -> None:
        """Clip gradients to a global norm, let the optimiser step, and forget the gradients."""
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._trained, max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def train_step(self, images: Images, labels: torch.Tensor) -> float:
        """``accumulate`` and ``update``; the loss."""
        loss = self.accumulate(images, labels)
        self.update()
        return loss

    def gather_gradients(self) -> dict[str, torch.Tensor] | None:
        """Return copies of all gradients under the user's names on rank 0, None elsewhere; what is unused has none."""
        if self._all.rank != 0:
            return None
        return {name: p.grad.clone() for name, p in self._model.named_parameters() if p.grad is not None}

    def gather_state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return a copy of the user's model's own ``state_dict`` on rank 0, None elsewhere."""
        if self._all.rank != 0:
            return None
        return {name: value.detach().clone() for name, value in self._model.state_dict().items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over weights and buffers from such a dict, on every rank."""
        self._model.load_state_dict(state)

    def traffic(self) -> dict[str, dict[str, int]]:
        """Return what this rank sent in the last step: messages and bytes by kind."""
        result = self._stage.traffic()
        for kind, counts in self._all.traffic().items():
            for key, count in counts.items():
                result[kind][key] += count
        return result

    # -- how it is done

    def _micro_step(
        self, compiled: Compiled, values: Values, targets: torch.Tensor, parameters: Values, count: int
    ) -> torch.Tensor:
        """Run one micro-batch forward and backward; return its share of the loss."""
        executor = Executor(compiled.tape, self._stage)
        with self._autocasting():
            records = executor.forward(values, record=True)
        self._store_buffers(compiled, values)
        leaves = [leaf.requires_grad_() if _is_float(leaf) else leaf for leaf in compiled.leaves(values)]
        with torch.enable_grad():
            loss = self._loss(compiled.pick(leaves), targets) / count
        # The answer is replicated, its cotangent a sum over ranks: one rank gives the loss its weight, the others zero.
        seed = torch.ones_like(loss) if self._stage.rank == 0 else torch.zeros_like(loss)
        loss.backward(seed)
        cotangents = {
            item.name: leaf.grad
            for item, leaf in zip(compiled.ranked.outputs, leaves, strict=True)
            if isinstance(item, Ref) and leaf.grad is not None
        }
        executor.backward(records, cotangents, parameters)
        return loss.detach().double()

    def _start(self, compiled: Compiled, part: torch.Tensor, microbatch: int = 0) -> Values:
        """Return the values that are there before the first instruction."""
        program = compiled.ranked.program
        values: Values = dict(program.constants)
        values.update(self._parameters(compiled))
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        values.update({value: buffers[name] for value, name in program.buffers.items()})
        values[program.image] = part
        values[KEY] = self.random.words(microbatch)
        return values

    def _parameters(self, compiled: Compiled) -> Values:
        named = dict(self._model.named_parameters(remove_duplicate=False))
        return {value: named[name] for value, name in compiled.ranked.program.parameters.items()}

    def _store_buffers(self, compiled: Compiled, values: Values) -> None:
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for name, value in compiled.ranked.program.mutations.items():
                buffers[name].copy_(values[value])

    def _local(self, images: Images) -> tuple[torch.Tensor, tuple[int, int, int, int]]:
        """Return (this rank's box of the batch, shape of the whole batch)."""
        if isinstance(images, torch.Tensor):
            shape = tuple(images.shape)
            if len(shape) != 4:
                raise RequestError(f"images have shape {shape}; give the whole batch as (B, C, H, W)")
            box = self._compiled(self._micro_shape(shape[0], shape)).ranked.read_box
            last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
            order = torch.channels_last if last else torch.contiguous_format
            local = images[..., box.y0 : box.y1, box.x0 : box.x1].contiguous(memory_format=order)
        else:
            local = _read(images, self._input_box)
            shape = (local.shape[0], *self._shape[1:])
            box = self._compiled(self._micro_shape(shape[0], shape)).ranked.read_box
            if box != self._input_box:  # in this mode the model begins with another window
                local = _read(images, box)
        self._stage.count("input", 0, local.numel() * local.element_size())
        return local.to(device=self._device, dtype=self._dtype), shape

    def _micro_shape(
        self, batch: int, shape: tuple[int, ...] | None = None, strict: bool = False
    ) -> tuple[int, int, int, int]:
        """Return the shape of one micro-batch; outside training a batch that does not divide is run whole."""
        count = self.plan.microbatches
        if batch % count and strict:
            raise RequestError(
                f"a batch of {batch} images cannot be cut into {count} equal micro-batches; "
                f"use a batch of {max(1, batch // count) * count} or plan.microbatches={_divisor(batch, count)}"
            )
        size = batch if batch % count else batch // count
        _, channels, height, width = shape if shape is not None else self._shape
        return size, channels, height, width

    def _compiled(self, shape: tuple[int, int, int, int]) -> Compiled:
        flags = tuple(module.training for module in self._model.modules())
        wanted = tuple(p.requires_grad for p in self._model.parameters())
        key = (shape, flags, wanted)
        if key not in self._cache:
            self._cache[key] = compile_model(
                self._model, shape, self._dtype, self.plan.grids[0], self._stage, self._output
            )
        return self._cache[key]

    def _mean_over_replicas(self, loss: torch.Tensor) -> float:
        if self.plan.replicas > 1:
            self._all.all_reduce(loss)
            loss = loss / self.plan.ranks
        return float(loss)

    def _reset_traffic(self) -> None:
        self._stage.reset()
        self._all.reset()

    def _autocasting(self) -> Any:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._autocast)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode for a while; every module gets its own flag back."""
        flags = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            with self._autocasting():
                yield
        finally:
            for module, flag in flags:
                module.training = flag


def parallelize(
    model: nn.Module,
    shape: tuple[int, int, int, int],
    plan: ParallelPlan,
    comm: Communicator,
    *,
    loss: Loss = F.cross_entropy,
    optimizer: OptimizerFactory | None = None,
    output: Callable[[Any], Any] | None = None,
    autocast: torch.dtype | None = None,
) -> Engine:
    """Spread a model over the ranks of a plan.

    Args:
        model: any ``nn.Module`` that takes one image tensor, untouched; parameters and buffers become rank 0's.
        shape: of the whole batch of one replica, ``(B, C, H, W)``.
        plan: how; ``plan.ranks`` must be ``comm.size``.
        comm: from ``hyfi_core.init()``, or a group of its ranks.
        loss: of one micro-batch, a mean over its samples.
        optimizer: makes an optimiser of a list of parameters; needed for ``update``.
        output: picks the logits out of what the model returns.
        autocast: computes in this type where autocast would (``torch.bfloat16``).

    Raises:
        RequestError: plan, ranks, shape or model do not go together; nothing has been sent then.
    """
    if plan.ranks != comm.size:
        raise RequestError(
            f"the plan needs {plan.ranks} ranks, {comm.size} are here; start {plan.ranks} or change plan.grids"
        )
    if plan.stages != 1:
        raise RequestError(f"the plan has {plan.stages} stages; this version runs plans of one stage, of any grid")
    if len(shape) != 4 or any(side < 1 for side in shape):
        raise RequestError(f"shape is {shape}; give (B, C, H, W) of the whole batch of one replica")
    if shape[0] % plan.microbatches:
        raise RequestError(
            f"a batch of {shape[0]} images cannot be cut into {plan.microbatches} equal micro-batches; "
            f"use plan.microbatches={_divisor(shape[0], plan.microbatches)}"
        )
    return Engine(model, shape, plan, comm, loss, optimizer, output, autocast)


def _read(images: Callable[[Box], torch.Tensor], box: Box) -> torch.Tensor:
    local = images(box)
    if local.shape[-2:] != box.shape:
        raise RequestError(f"images({box}) returned shape {tuple(local.shape)}; its last sides must be {box.shape}")
    return local


def _divisor(batch: int, count: int) -> int:
    """Return the largest number of equal micro-batches not above ``count``."""
    return max(n for n in range(1, count + 1) if batch % n == 0)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _joined(answers: list[Any]) -> Any:
    """Put the micro-batches' answers together again, whatever structure they have."""
    if len(answers) == 1:
        return answers[0]
    leaves = [torch.utils._pytree.tree_flatten(answer) for answer in answers]
    joined = [
        torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].dim() else parts[0]
        for parts in zip(*(flat for flat, _ in leaves), strict=True)
    ]
    return torch.utils._pytree.tree_unflatten(joined, leaves[0][1])
