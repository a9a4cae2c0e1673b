"""Guards against what ``torch.export`` silently drops: it is preserved if possible, and refused otherwise.

Single calls of PyTorch functions are handled in ``watched_calls``, checkpoints in ``checkpoints``, and effects of a
forward on its module here:

```
self.buffer = value            in a submodule, dropped by export        → self.buffer.copy_(value)
self.features = x              a fake tensor on the user's module       → removed
self.cache[size] = table       of no pixels: computed in each program   → removed (``Caches``)
features["map"] = x            a fake tensor outside of the model       → an error when it is used (``StoredTensor``)
self.height = x.shape[2]       the same in each forward                 → traced again, with this value: no change
self.calls += 1                export would keep the first value        → refused
return Output(logits=…)        unknown class                            → registered as a pytree
backward hooks of modules      dropped                                  → refused
```
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree

from hyfi_core.capture.checkpoints import plain_checkpoints
from hyfi_core.capture.functions.pointwise import recorded
from hyfi_core.capture.module_state import (
    Attributes,
    attributes,
    is_counted,
    is_tensor,
    outside_attributes,
)
from hyfi_core.capture.patching import patched, traced_where
from hyfi_core.capture.places import calling_line
from hyfi_core.capture.storing.later_forwards import Stored, change_message, is_constant
from hyfi_core.capture.storing.stored_tensors import Caches, StoredTensors
from hyfi_core.capture.watched_calls import WatchedCalls
from hyfi_core.errors import RequestError

_trace = threading.local()
"""Whether this thread traces: other threads may run models with the same classes at the same time."""


@contextlib.contextmanager
def trace_guards(model: nn.Module, stored: StoredTensors, assigned: list[Stored] | None) -> Iterator[None]:
    """Context for tracing ``model``. It patches classes of PyTorch, with effect in this thread: one thread at a time.

    Args:
        model: any module; not changed.
        stored: notes the tensors of the trace.
        assigned: notes constants that the forward stores; None: attributes are refused.

    Raises:
        RequestError: the model does something that capture cannot preserve.
    """
    _refuse_backward_hooks(model)
    calls = WatchedCalls(model, stored)

    def inside() -> contextlib.AbstractContextManager[Any] | None:
        return _counted(calls) if _traces() else None

    # The patches hold for all threads; by this flag, those that do not trace get PyTorch's own functions.
    _trace.traces = True
    try:
        with (
            restored(model),
            _watched_forward(model, calls, assigned),
            plain_checkpoints(inside),
            patched(nn.Module, "__setattr__", _assign),
            patched(_BatchNorm, "forward", _normalise),
            patched(F, "instance_norm", _instance_norm),
            patched(torch, "manual_seed", _seed),
            traced_where(_traces),
            patched(torch.autograd.Function, "apply", classmethod(_apply)),
        ):
            yield
    finally:
        _trace.traces = False


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Context that restores the attributes of all modules on exit: removed, added and changed ones."""
    # Shallow: registries stay the same objects. ``Caches`` restores the contents of containers.
    before = {module: dict(vars(module)) for module in model.modules()}
    try:
        yield
    finally:
        for module, values in before.items():
            # Not by setattr, which is still patched and would register or copy values.
            present = vars(module)
            for name in present.keys() - values.keys():
                del present[name]
            present.update(values)


def refuse_fake_constants(constants: dict[str, torch.Tensor]) -> None:
    """Refuse constants that are fake tensors of the trace.

    Raises:
        RequestError: there is one.
    """
    for name, constant in constants.items():
        if isinstance(constant, FakeTensor):
            raise RequestError(
                f"the forward turns a computed tensor of shape {tuple(constant.shape)} into a constant ({name}), "
                f"whose value is not known during capture; use .detach() instead"
            )


@contextlib.contextmanager
def _watched_forward(model: nn.Module, calls: WatchedCalls, assigned: list[Stored] | None) -> Iterator[None]:
    """Context that watches the calls of the model's forward, and refuses or undoes what it has changed at its end.

    ``assigned`` gets the constants that the forward has stored; None: these are refused.
    """
    before: Attributes = {}
    outside: Attributes = {}
    caches = Caches(model)

    def begin(module: nn.Module, args: Any) -> None:
        # The arguments that the forward gets: export calls it with a replacement of the image.
        calls.of_image.add(torch.utils._pytree.tree_leaves(args))
        before.update(attributes(model))
        outside.update(outside_attributes(model))
        calls.begin()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        """Refuse or undo what the forward has changed; the order of these checks matters."""
        calls.end()  # what follows is not part of the forward
        register_output(output)  # export takes only outputs whose class is a pytree node
        _refuse_counted(outside, outside_attributes(model))
        # Before attributes are compared: caches that the forward fills are allowed, and emptied again.
        constants_in_caches = caches.undo(calls.of_image)
        if assigned is not None:
            assigned.extend(constants_in_caches)
        _refuse_changed(model, before, attributes(model), assigned)
        calls.refuse_functions(torch.utils._pytree.tree_leaves(output), returned=True)
        calls.refuse_host_randomness()

    # The pre-hook comes first, so that the user's hooks are watched, too.
    handles = (model.register_forward_pre_hook(begin, prepend=True), model.register_forward_hook(end))
    try:
        yield
    finally:
        calls.end()  # a forward that raises in a trace calls no hook, not even with always_call=True
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _counted(calls: WatchedCalls) -> Iterator[None]:
    """Context of a checkpoint's function: it counts as one level of ``calls.checkpoints``."""
    calls.checkpoints += 1
    try:
        yield
    finally:
        calls.checkpoints -= 1


def _refuse_changed(model: nn.Module, before: Attributes, after: Attributes, assigned: list[Stored] | None) -> None:
    """Refuse attributes that the forward has replaced, because export keeps their values of this one trace.

    Attributes that are tensors now, and those that the forward has created, are allowed.

    Args:
        model: the model, after its forward.
        before: attributes before the forward.
        after: attributes after it.
        assigned: gets the attributes that are constants now, with which another trace begins; None: these are refused,
            too.
    """
    for (path, name), value in after.items():
        if before.get((path, name)) == value or is_tensor(value):
            continue
        holder = model.get_submodule(path)
        if assigned is not None and is_constant(vars(holder)[name]):
            assigned.append((holder, name, vars(holder)[name]))
        elif (path, name) in before:
            raise RequestError(change_message(model, (holder, name, None)))


def _refuse_counted(before: Attributes, after: Attributes) -> None:
    """Refuse counters and generators outside of the model that the forward has used; caches are allowed."""
    for key, value in before.items():
        if is_counted(value, after.get(key)):
            raise RequestError(
                f"the forward changes {key[1]!r} outside of the model, which capture cannot record: it would keep "
                f"the first value. Make it a buffer (register_buffer) changed in place, or change it between steps; "
                f"draw random numbers with torch (torch.rand(()))"
            )


def _traces() -> bool:
    return getattr(_trace, "traces", False)


def _refuse_backward_hooks(model: nn.Module) -> None:
    """Refuse a model with backward hooks."""
    for name, module in model.named_modules():
        # A graph has operators, not modules, so that nothing would call these.
        if module._backward_hooks or module._backward_pre_hooks:
            raise RequestError(
                f"module {name or 'the model itself'} ({type(module).__name__}) has backward hooks, which would not "
                f"be called; remove them, or change the gradients that engine.gather_gradients() returns"
            )


# Each ``_PLAIN`` is PyTorch's own function, read at import: later, a patch may be in its place.
_PLAIN_SEED: Any = torch.manual_seed


def _seed(seed: int) -> torch.Generator:
    """``torch.manual_seed``, refused during a trace: a later check could not detect a call with the current seed."""
    if _traces():
        raise RequestError(
            f"the model seeds torch's generator as it runs, at {calling_line()}; random numbers are keyed by the "
            "engine's seed and step instead"
        )
    generator: torch.Generator = _PLAIN_SEED(seed)
    return generator


# The class method, in Python or (from torch 2.14) C, not bound to a class: ``_apply`` binds it to the subclass.
_PLAIN_APPLY: Any = inspect.getattr_static(torch.autograd.Function, "apply")


def _apply(function: Any, *args: Any, **named: Any) -> Any:
    """``Function.apply``: functions of the user become operators of the program."""
    # PyTorch's own functions, such as those of torch.library, are traced as they are.
    if not _traces() or function.__module__.startswith("torch."):
        return _PLAIN_APPLY.__get__(None, function)(*args, **named)
    return recorded(function, args, _untraced)


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Context inside of a trace in which the patched functions behave as PyTorch's own."""
    _trace.traces = False
    try:
        yield
    finally:
        _trace.traces = True


_PLAIN_NORM: Any = _BatchNorm.forward


def _normalise(module: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Batch norm whose cumulative average (``momentum=None``) is traced as arithmetic.

    Its factor, 1 / number of batches, would be a constant of the captured operator. So the native kernel, with momentum
    1, only computes the batch's statistics, and arithmetic updates the running ones.
    """
    batches: Any = module.num_batches_tracked
    running: Any = (module.running_mean, module.running_var)
    if not _traces() or not module.training or module.momentum is not None or batches is None or running[0] is None:
        plain: torch.Tensor = _PLAIN_NORM(module, x)
        return plain
    # PyTorch's forward checks this first; the kernel itself accepts other numbers of dims.
    module._check_input_dim(x)
    # With momentum 1, the kernel overwrites these with the batch's statistics.
    batch = torch.zeros_like(running[0]), torch.zeros_like(running[1])
    result = F.batch_norm(x, *batch, module.weight, module.bias, True, 1.0, module.eps)
    batches.add_(1)
    for statistic, of_batch in zip(running, batch, strict=True):
        # Computed from the buffer: a Python number would stay constant in all steps.
        factor = 1.0 / batches.to(statistic.dtype)
        statistic.copy_(statistic * (1.0 - factor) + of_batch * factor)
    return result


_PLAIN_INSTANCE_NORM: Any = F.instance_norm


def _instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``F.instance_norm``, with its update of running statistics as arithmetic, which a trace records.

    Within PyTorch's operator, the trace would not see that they change. Running statistics are updated with the mean
    and the unbiased variance of each image, averaged over the images. In evaluation mode, they are used as by a batch
    norm.
    """
    if not _traces() or running_mean is None or running_var is None:
        settings = running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        plain: torch.Tensor = _PLAIN_INSTANCE_NORM(input, *settings)
        return plain
    if not use_input_stats:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)
    # Detached: PyTorch's kernel gives running statistics no gradient either.
    values = input.detach().to(running_mean.dtype)
    of_images = torch.var_mean(values, tuple(range(2, input.dim())), correction=1)
    for statistic, per_image in zip((running_var, running_mean), of_images, strict=True):
        statistic.copy_(statistic * (1.0 - momentum) + per_image.mean(0) * momentum)
    result: torch.Tensor = _PLAIN_INSTANCE_NORM(input, None, None, weight, bias, True, momentum, eps)
    return result


_PLAIN_SETATTR: Any = nn.Module.__setattr__


def _assign(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute; ``self.buffer = value`` of a traced value becomes a copy into the buffer, which is recorded."""
    # A module has no registries until its ``__init__`` has called super().__init__().
    buffer = vars(module).get("_buffers", {}).get(name)
    if (
        not _traces()
        or buffer is None
        or not isinstance(value, torch.Tensor)
        # ``self.steps += 1`` changes the buffer in place and then assigns it to itself.
        or value is buffer
        or not _is_traced(value)
    ):
        _PLAIN_SETATTR(module, name, value)
        return
    if value.shape != buffer.shape or value.dtype != buffer.dtype:
        raise RequestError(
            f"{type(module).__name__} changes the shape or dtype of its buffer {name!r} in the forward: "
            f"{tuple(buffer.shape)} {buffer.dtype} became {tuple(value.shape)} {value.dtype}; buffers must keep both"
        )
    buffer.copy_(value)


def _is_traced(value: torch.Tensor) -> bool:
    """Whether a tensor is a traced value, and not the trace's own replacement of a buffer."""
    return isinstance(value, FakeTensor) or torch._is_functional_tensor(value)


def register_output(output: Any) -> None:
    """Register the class of an output as a pytree node, unless it is one."""
    kind = type(output)
    is_known = kind in _pytree.SUPPORTED_NODES or isinstance(output, (torch.Tensor, tuple, list, dict, type(None)))
    if is_known or not (dataclasses.is_dataclass(output) or hasattr(output, "__dict__")):
        return
    _pytree.register_pytree_node(kind, _attributes, lambda values, names: _put_together(kind, values, names))


def _attributes(output: Any) -> tuple[list[Any], tuple[str, ...]]:
    """Return (values, names) of the fields of a dataclass, or of an object's attributes."""
    fields = dataclasses.fields(output) if dataclasses.is_dataclass(output) else ()
    names = tuple(field.name for field in fields) or tuple(vars(output))
    return [getattr(output, name) for name in names], names


def _put_together(kind: type, values: Any, names: Any) -> Any:
    """Return an object of class ``kind`` with these attributes; the inverse of ``_attributes``."""
    # ``__init__`` is not called: its arguments may differ from the attributes.
    output: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(output, name, value)  # frozen dataclasses, too
    return output
