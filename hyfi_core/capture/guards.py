"""What a trace would silently lose, kept where it can be, and refused where not.

``torch.export`` records calculations. It drops what else a forward does to its gradients or its module, or leaves
something behind:

```
with torch.no_grad():          calculations go on the tape all the same     → results are detached
x.data                         a constant of the moment                     → x.detach()
self.buffer = value            in a submodule, forgotten                    → self.buffer.copy_(value)
self.anything = x              a fake tensor on the user's module           → taken off again
return Answer(logits=…)        unknown                                      → made known
autograd.Function, hooks       their backward is forgotten                  → refused
```
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.utils import _pytree

from hyfi_core.capture.changed import changed
from hyfi_core.errors import RequestError

_here = threading.local()
"""Whether this thread traces: others may run models meanwhile, with the same classes."""


@contextlib.contextmanager
def trace_guards(model: nn.Module) -> Iterator[None]:
    """Have ``model`` traced as it runs. It changes classes of PyTorch's, for this thread: one thread at a time.

    Raises:
        RequestError: its backward is more than that of its calculations.
    """
    _refuse_backward_hooks(model)
    before = {module: dict(vars(module)) for module in model.modules()}
    handle = model.register_forward_hook(_known_answer)
    _here.traces = True
    try:
        with (
            changed(torch.autograd.Function, "apply", classmethod(_refuse_function)),
            changed(torch.Tensor, "register_hook", _refuse_tensor_hook),
            changed(torch.Tensor, "data", property(_detached, _PLAIN_DATA.__set__)),
            changed(nn.Module, "__setattr__", _assign),
        ):
            yield
    finally:
        _here.traces = False
        handle.remove()
        for module, attributes in before.items():
            _restore(vars(module), attributes)


def detach_what_has_no_gradient(exported: ExportedProgram) -> None:
    """Detach, in the graph, what was calculated where gradients were switched off."""
    graph = exported.graph_module.graph
    off = [node for node in graph.nodes if _switches_off(node)]
    for node in off:
        results = [user for user in node.users if user.op == "call_function"] if _is_many(node) else [node]
        for result in results:
            if not isinstance(result.meta.get("val"), torch.Tensor):
                continue
            with graph.inserting_after(result):
                detached = graph.call_function(torch.ops.aten.detach.default, (result,))
            detached.meta.update(result.meta)
            result.replace_all_uses_with(detached, delete_user_cb=lambda user, own=detached: user is not own)
            _rename_outputs(exported, result.name, detached.name)
    if off:
        exported.graph_module.recompile()


def refuse_fake_constants(constants: dict[str, torch.Tensor]) -> None:
    """Refuse constants that are what a trace computed with.

    Raises:
        RequestError: there is one.
    """
    for name, constant in constants.items():
        if isinstance(constant, FakeTensor):
            raise RequestError(
                f"the model takes a tensor {tuple(constant.shape)} out of its calculation as it runs ({name}), "
                "where its value is not known; .detach() keeps it in"
            )


def _traces() -> bool:
    return getattr(_here, "traces", False)


def _switches_off(node: torch.fx.Node) -> bool:
    name = getattr(node.target, "__name__", "") or str(node.target)
    return node.op == "call_function" and "wrap_with_set_grad_enabled" in name and node.args[0] is False


def _is_many(node: torch.fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), torch.Tensor)


def _rename_outputs(exported: ExportedProgram, old: str, new: str) -> None:
    """Have the signature name an output, or a new buffer, as the graph now does."""
    for spec in exported.graph_signature.output_specs:
        if getattr(spec.arg, "name", None) == old:
            spec.arg.name = new


def _refuse_backward_hooks(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise RequestError(
                f"module {name or 'the model itself'} ({type(module).__name__}) has backward hooks, which would not be "
                "called; remove them, or change gradients after engine.gather_gradients()"
            )


_PLAIN_APPLY: Any = vars(torch.autograd.Function)["apply"].__func__


def _refuse_function(cls: Any, *given: Any, **named: Any) -> Any:
    if not _traces() or cls.__module__.startswith("torch."):  # checkpointing and its like calculate what they wrap
        return _PLAIN_APPLY(cls, *given, **named)
    raise RequestError(
        f"the model calls {cls.__module__}.{cls.__qualname__}, an autograd.Function, whose own backward would be lost; "
        "write its forward with operators of PyTorch whose backward is meant (x + (f(x) - x).detach() passes gradients "
        "by f)"
    )


_PLAIN_HOOK: Any = torch.Tensor.register_hook


def _refuse_tensor_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
    if not _traces():
        return _PLAIN_HOOK(tensor, hook)
    raise RequestError(
        f"the model registers a hook on a tensor {tuple(tensor.shape)}, which would not be called; "
        "change gradients after engine.gather_gradients()"
    )


_PLAIN_DATA: Any = torch.Tensor.data


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """``x.data`` of a value on its way through the model; a parameter's stays what it is."""
    stays = not _traces() or isinstance(tensor, nn.Parameter) or not _is_traced(tensor)
    result: torch.Tensor = _PLAIN_DATA.__get__(tensor) if stays else tensor.detach()
    return result


_PLAIN_SETATTR: Any = nn.Module.__setattr__


def _assign(module: nn.Module, name: str, value: Any) -> None:
    """``self.buffer = value`` as the model means it: from now on the buffer holds that."""
    buffer = vars(module).get("_buffers", {}).get(name)
    if (
        not _traces()
        or buffer is None
        or not isinstance(value, torch.Tensor)
        or value is buffer
        or not _is_traced(value)
    ):
        _PLAIN_SETATTR(module, name, value)
        return
    if value.shape != buffer.shape or value.dtype != buffer.dtype:
        raise RequestError(
            f"{type(module).__name__} gives its buffer {name!r} another shape or type as it runs: "
            f"{tuple(buffer.shape)} {buffer.dtype} became {tuple(value.shape)} {value.dtype}; a buffer keeps both"
        )
    buffer.copy_(value)


def _is_traced(value: torch.Tensor) -> bool:
    """Whether a tensor is a value of the trace, and not what the trace itself puts in the place of buffers."""
    return isinstance(value, FakeTensor) or torch._is_functional_tensor(value)


def _known_answer(module: nn.Module, given: Any, answer: Any) -> None:
    """Let objects that hold the model's answer in attributes be taken apart and put together."""
    kind = type(answer)
    plain = _pytree.SUPPORTED_NODES.get(kind) is None and not isinstance(answer, (torch.Tensor, tuple, list, dict))
    if answer is None or not plain or not (dataclasses.is_dataclass(answer) or hasattr(answer, "__dict__")):
        return
    _pytree.register_pytree_node(kind, _attributes, lambda values, names: _put_together(kind, values, names))


def _attributes(answer: Any) -> tuple[list[Any], tuple[str, ...]]:
    fields = dataclasses.fields(answer) if dataclasses.is_dataclass(answer) else ()
    names = tuple(field.name for field in fields) or tuple(vars(answer))
    return [getattr(answer, name) for name in names], names


def _put_together(kind: type, values: Any, names: Any) -> Any:
    answer: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(answer, name, value)  # frozen dataclasses, too
    return answer


def _restore(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name in attributes.keys() - before.keys():
        del attributes[name]
    attributes.update(before)
