"""``parallelize``: distributes a model over ranks, after checking its arguments."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core.capture.released import device_of
from hyfi_core.comm.agreement.agree import agree, compare_requests
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.lowering.compiling.segment_compiler import CompileMode, SegmentCompiler, why_not_compiled
from hyfi_core.plan.batch_shapes import Shape
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.strategy import Strategy, plan_for
from hyfi_core.runtime.batch_reader import MemoryFormat, check_share, divisor
from hyfi_core.runtime.calls.local_use import refuse_stale
from hyfi_core.runtime.engine import Engine
from hyfi_core.runtime.groups import node_name
from hyfi_core.runtime.losses.loss_function import Loss, LossOver
from hyfi_core.runtime.losses.training_loss import FLOAT16
from hyfi_core.runtime.settings import EngineSettings, GraphMode, OptimizerFactory
from hyfi_core.schedule.in_flight import recomputes
from hyfi_core.stored_state import Weights


def parallelize(
    model: nn.Module,
    shape: Shape,
    plan: ParallelPlan | None,
    comm: Communicator,
    *,
    strategy: Strategy | None = None,
    loss: Loss = F.cross_entropy,
    loss_over: LossOver = "auto",
    optimizer: OptimizerFactory | None = None,
    output: Callable[[Any], Any] | None = None,
    autocast: torch.dtype | None = None,
    image_dtype: torch.dtype | None = None,
    memory_format: MemoryFormat = "auto",
    verify: bool = True,
    release: bool = False,
    weights: Weights | None = None,
    compile: CompileMode = "off",
    cuda_graphs: GraphMode = "auto",
) -> Engine:
    """Distribute a model over the ranks of a plan.

    Args:
        model: any ``nn.Module`` of one image tensor, unchanged; parameters and buffers are set to those of rank 0.
        shape: shape of one replica's whole batch, ``(B, C, H, W)``; with ``plan.shares`` B is this replica's entry.
        plan: ``plan.ranks`` must be ``comm.size``; None with a ``strategy``.
        comm: from ``hyfi_core.init()``, or a group of its ranks.
        strategy: "data", "model", "spatial" or "hybrid": creates a plan for ``comm.size`` ranks.
        loss: any function of (output, labels) of the whole batch that returns a scalar.
        loss_over: "batch", "microbatch" or "auto"; see ``LossOver``.
        optimizer: creates an optimizer for a list of parameters; needed for ``update``.
        output: selects the logits from the model's output.
        autocast: dtype of autocast: ``torch.bfloat16``, or ``torch.float16`` for prediction alone; None: no autocast.
        image_dtype: dtype of images, if not the parameters': ``torch.uint8`` for a model that scales bytes itself.
        memory_format: format of feature maps, see ``MemoryFormat``; outputs and gradients have that of one process.
        verify: whether rank 0 first compares module and capture on small images, in both modes; refuses a difference.
        release: whether to move to the meta device what this rank's stages do not use of its own copy of ``model``.
        weights: for a model on the meta device: a safetensors file, a folder of them, a state, or a function of a name,
            from which tensors are read to torch's default device, with ``release`` only those of this rank's stages.
        compile: "on": ``torch.compile`` fuses what is between messages, which changes rounding; "auto": on GPUs only.
        cuda_graphs: "auto": on one GPU, equal training steps are repeated as CUDA graphs; see ``ReplayedSteps``.

    Raises:
        RequestError: on every rank, before anything is changed: plan, ranks, shape and model do not fit, or differ.
    """
    settings = EngineSettings(
        loss=loss,
        loss_over=loss_over,
        optimizer=optimizer,
        output=output,
        autocast=autocast,
        image_dtype=image_dtype,
        memory_format=memory_format,
        verify=verify,
        release=release,
        weights=weights,
        compile=compile,
        cuda_graphs=cuda_graphs,
    )
    return _warned(comm, _engine(model, shape, plan, strategy, comm, settings))


def _engine(
    model: nn.Module,
    shape: Shape,
    plan: ParallelPlan | None,
    strategy: Strategy | None,
    comm: Communicator,
    settings: EngineSettings,
) -> Engine:
    """Check the arguments on each rank and compare them between ranks, then create the engine."""
    # Each rank's own arguments first: one that refuses alone must not leave the others in the comparison.
    agree(comm, lambda: check_choices(settings.autocast, settings.optimizer, settings.loss_over))
    agree(comm, lambda: _check_graphs(settings.cuda_graphs))
    plan = agree(comm, lambda: _checked(model, shape, plan, strategy, comm, settings))
    compare_requests(comm, model, shape, plan, settings.described(model))
    _refuse_shared(model, comm, settings.release)
    return Engine(model, shape, plan, comm, settings, _compiler(settings.compile, plan, model, comm))


def _warned(comm: Communicator, engine: Engine) -> Engine:
    """Return the engine; on rank 0, warn of a plan that saves no memory, and of buffers that files leave out."""
    plan = engine.plan
    if comm.rank == 0 and plan.recompute and not any(recomputes(plan, stage) for stage in range(plan.stages)):
        warnings.warn(
            "plan.recompute saves no memory in this plan, so nothing is recomputed: backward follows forward at once; "
            "plan.interleave=8 cuts the model into pieces that are recomputed one at a time; plan.cells, plan.spill or "
            "larger plan.grids save memory, too",
            stacklevel=3,
        )
    if comm.rank == 0 and plan.interleave > 1 and len(plan.grids) == 1 and not plan.recompute:
        warnings.warn(
            f"plan.interleave is {plan.interleave} on one grid without plan.recompute, which saves no memory: pieces "
            "of a model do if they are recomputed; add plan.recompute=True, or use plan.interleave=1",
            stacklevel=3,
        )
    names = sorted(engine.unsaved)
    if names and comm.rank == 0 and engine.trains:
        more = f" and {len(names) - 1} more change" if names[1:] else " changes"
        warnings.warn(
            f"buffer {names[0]!r}{more} in training, but the model's state_dict leaves it out (persistent=False): "
            f"checkpoints keep it beside for resumed runs and predictions, but gather_state_dict and validators do "
            f"without it; register it with persistent=True",
            stacklevel=3,
        )
    return engine


def _refuse_shared(model: nn.Module, comm: Communicator, release: bool) -> None:
    """Refuse to release a module that several ranks of one process share: what one releases, another needs."""
    if not release:
        return
    holders = comm.gather_objects([node_name(), os.getpid(), id(model)])
    # JSON has no tuples: lists arrive, which cannot be in a set.
    shared = comm.broadcast_object(None if holders is None else len(set(map(tuple, holders))) < len(holders))
    if shared:
        raise RequestError(
            "release=True, but several ranks share one module: each would release what others need; pass a module of "
            "its own on each rank, such as copy.deepcopy(model), or release=False"
        )


def _checked(
    model: nn.Module,
    shape: Shape,
    plan: ParallelPlan | None,
    strategy: Strategy | None,
    comm: Communicator,
    settings: EngineSettings,
) -> ParallelPlan:
    """Check the arguments of this rank; return the plan, or the one that the strategy creates.

    Raises:
        RequestError: they do not fit together.
    """
    optimizer = settings.optimizer
    if not isinstance(model, nn.Module):
        raise RequestError(f"model is {type(model).__name__}; pass a torch.nn.Module that takes one image tensor")
    if len(shape) != 4 or any(not isinstance(side, int) or side < 1 for side in shape):
        raise RequestError(f"shape is {shape}; pass (B, C, H, W) of the whole batch of one replica")
    if (plan is None) == (strategy is None):
        raise RequestError("parallelize needs either a plan or a strategy; strategies are data, model, spatial, hybrid")
    if plan is not None and not isinstance(plan, ParallelPlan):
        raise RequestError(f"plan is a {type(plan).__name__}; pass a hyfi_core.ParallelPlan(grids=((rows, columns),))")
    if plan is None:
        assert strategy is not None
        plan = plan_for(strategy, comm.size, shape[0])
    if plan.tiles is not None:
        raise RequestError(f"plan.tiles is {plan.tiles}, for slides as bags of tiles; call hyfi_core.parallelize_tiles")
    if plan.ranks != comm.size:
        raise RequestError(
            f"the plan needs {plan.ranks} ranks, but {comm.size} are running; start {plan.ranks}, or change plan.grids"
        )
    # After the number of ranks, without which a rank has no replica.
    check_share(plan, comm.rank // plan.ranks_per_replica, shape[0])
    if shape[0] % plan.microbatches:
        raise RequestError(
            f"a batch of {shape[0]} images cannot be cut into {plan.microbatches} equal micro-batches; "
            f"use plan.microbatches={divisor(shape[0], plan.microbatches)}"
        )
    check_model(model)
    check_weights(model, settings.weights, settings.verify)
    refuse_stale(model)
    check_functions(settings.loss, settings.output, optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        raise RequestError(
            f"optimizer is a {type(optimizer).__name__}; pass a function that creates one for this rank's parameters: "
            f"lambda params: torch.optim.{type(optimizer).__name__}(params, ...)"
        )
    return plan


def check_choices(autocast: torch.dtype | None, optimizer: object, loss_over: LossOver) -> None:
    """Refuse settings that no model can be trained with."""
    if loss_over not in get_args(LossOver):
        raise RequestError(f"loss_over is {loss_over!r}; pass 'auto', 'batch' or 'microbatch'")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise RequestError(f"autocast is {autocast!r}; pass torch.bfloat16, or None for the dtype of the weights")
    if autocast == torch.float16 and optimizer is not None:
        raise RequestError(FLOAT16)


def _check_graphs(cuda_graphs: GraphMode) -> None:
    """Refuse a mode of CUDA graphs that does not exist."""
    if cuda_graphs not in get_args(GraphMode):
        raise RequestError(f"cuda_graphs is {cuda_graphs!r}; pass 'auto' or 'off'")


def _check_compile(compile: CompileMode, plan: ParallelPlan) -> None:
    """Refuse a mode of compilation that does not exist, or does not go with spilling."""
    if compile not in get_args(CompileMode):
        raise RequestError(f"compile is {compile!r}; pass 'auto', 'off' or 'on'")
    if compile == "on" and plan.spill is not None:
        raise RequestError(
            f"compile is 'on', but with plan.spill={plan.spill!r} memory is planned for segments as they are; pass "
            f"compile='auto' or 'off', or plan.spill=None"
        )


def _compiler(compile: CompileMode, plan: ParallelPlan, model: nn.Module, comm: Communicator) -> SegmentCompiler | None:
    """Return the compiler of segments; None on all ranks if it is off or one rank cannot compile (collective)."""
    agree(comm, lambda: _check_compile(compile, plan))
    device = device_of(model)
    if compile == "off" or plan.spill is not None or (compile == "auto" and device.type != "cuda"):
        return None
    # All or none: compiled segments round differently, and replicated values must be equal on all ranks.
    reasons = comm.gather_objects(why_not_compiled(device)) or ()  # None on all ranks but the first
    refusals = [f"on rank {rank}, {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    first_refusal = comm.broadcast_object(refusals[0] if refusals else None)
    if first_refusal is None:
        return SegmentCompiler()
    if comm.rank == 0:
        warnings.warn(f"segments run uncompiled on all ranks: {first_refusal}", stacklevel=3)
    return None


def check_functions(loss: object, output: object, optimizer: object) -> None:
    """Refuse a loss, an output or an optimizer that is not a function."""
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise RequestError(f"loss is the class {loss.__name__}; pass an object of it: {loss.__name__}()")
    if not callable(loss):
        raise RequestError(f"loss is {loss!r}; pass a function of (output, labels), such as cross_entropy")
    if output is not None and not callable(output):
        raise RequestError(f"output is {output!r}; pass a function of what the model returns, or None")
    if optimizer is not None and not callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        raise RequestError(
            f"optimizer is {optimizer!r}; pass a function of a list of parameters: "
            "lambda params: torch.optim.SGD(params, lr=0.1)"
        )


def check_model(model: nn.Module) -> None:
    """Refuse a module that is scripted, or has lazy parameters."""
    scripted = next((name for name, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)), None)
    if scripted is not None:
        subject = f"module {scripted!r}" if scripted else "the model"
        raise RequestError(f"{subject} is scripted (torch.jit); pass the torch.nn.Module that it was made of")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise RequestError(f"{name!r} of the model has no shape yet; run the model once, on a small image")


def check_weights(model: nn.Module, weights: Weights | None, verify: bool) -> None:
    """Refuse tensors on the meta device without weights, and weights without them."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    name = next((name for name, tensor in tensors if tensor.is_meta), None)
    if name is not None and weights is None:
        raise RequestError(
            f"{name!r} of the model is on the meta device and has no data, or was released by an earlier "
            "parallelize(..., release=True); pass weights=FILE.safetensors, or a new model with data"
        )
    if name is not None and verify:
        raise RequestError(
            f"{name!r} of the model is on the meta device, so that rank 0 cannot compare the model with its capture; "
            f"pass verify=False"
        )
    if name is None and weights is not None:
        raise RequestError(
            "weights are given, but the model is not on the meta device; load them with model.load_state_dict, or "
            "build the model under torch.device('meta')"
        )
    if not (weights is None or callable(weights) or isinstance(weights, (str, os.PathLike, Mapping))):
        raise RequestError(
            f"weights is a {type(weights).__name__}; pass a safetensors file, a state_dict, or a function of a name"
        )
