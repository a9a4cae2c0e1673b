"""Capture: the user's untouched module becomes a program, through ``torch.export`` at the image's full size.

The input is a fake tensor, so that a 16384 x 16384 image costs nothing. ``run_decompositions({})`` makes the graph
functional (no ``relu_``, no hidden counters) and keeps ``conv2d`` and similar operators, which autocast supports; a
full decomposition would give ``aten.convolution``, which autocast ignores.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import operator
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from hyfi_core.capture.functions.pointwise import function_of
from hyfi_core.capture.functions.replaced_operators import REPLACED, copied
from hyfi_core.capture.guards import refuse_fake_constants, trace_guards
from hyfi_core.capture.patching import PATCHING, patched, traced_here
from hyfi_core.capture.places import explained, traced_line
from hyfi_core.capture.program import Operator, Program, Ref, ValueInfo, copying_returned_inputs, with_first_names
from hyfi_core.capture.released import device_of, stood_in
from hyfi_core.capture.storing.created_attributes import created_attributes_allowed
from hyfi_core.capture.storing.later_forwards import Stored, check_later_forwards
from hyfi_core.capture.storing.stored_tensors import StoredTensors
from hyfi_core.collection import collection_paused
from hyfi_core.errors import RequestError
from hyfi_core.torch_version import check_torch_version


def capture(model: nn.Module, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Program:
    """Return the program of ``model`` for images of this shape, with its training flags as they are now.

    Args:
        model: any module that takes one image tensor; not changed.
        shape: (micro-batch, channels, height, width).
        dtype: dtype of the images.

    Raises:
        RequestError: the model cannot be captured; the message names the reason, the module and the line.
    """
    check_torch_version()
    stored = StoredTensors()
    try:
        # A forward may store constants only if a second trace, which begins with them, gives the same program.
        assigned: list[Stored] = []

        def traced(noted: list[Stored] | None) -> Program:
            return with_first_names(_parse(_exported(model, shape, dtype, stored, noted)), model)

        program = traced(assigned)
        check_later_forwards(model, program, assigned, traced)
        return program
    except RequestError as error:
        raise RequestError(f"the model {type(model).__name__} cannot be captured: {error}") from None
    # torch.export and the forward may raise any class: for the user, all mean that the model cannot be captured.
    except Exception as error:
        raise RequestError(
            f"the model {type(model).__name__} cannot be captured for images of shape {shape}, "
            f"{explained(error, model)}"
        ) from None
    finally:
        # Also after an error: hooks may have stored tensors of the trace before it.
        stored.void()


def _exported(
    model: nn.Module,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    stored: StoredTensors,
    assigned: list[Stored] | None,
) -> ExportedProgram:
    """Return the exported graph of a model, made functional: its operators change no value in place.

    Args:
        model: the user's module; its attributes are restored.
        shape: ``(B, C, H, W)`` of an image.
        dtype: dtype of the image.
        stored: notes tensors of the trace that the model may store.
        assigned: gets constants that the forward stores; None: a forward that changes attributes is refused.
    """
    # The lock first: two exports at once crash, and the other contexts change state of the whole process.
    with PATCHING, collection_paused(), _graphs_without_code(), warnings.catch_warnings(), _no_autocast(model):
        warnings.simplefilter("ignore")
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            image = torch.empty(shape, dtype=dtype, device=device_of(model))  # a norm refuses another device
        with (
            # Even for prediction, so that training and prediction agree on which values carry gradients.
            torch.enable_grad(),
            _quiet(),
            _without_metadata(),
            stood_in(model, mode),
            # Last, because these watch the forward itself.
            trace_guards(model, stored, assigned),
            created_attributes_allowed(),
        ):
            # Not strict: the forward runs in Python, where the guards can watch it. With strict, Dynamo would not call
            # the patched functions.
            traced = torch.export.export(model, (image,), strict=False)
        _separate_unread_names(traced)
        # Outside of the guards, which would take the code of decompositions for the model's.
        # These contexts only save time: the graph is the same without them.
        with _own_composites_only(traced), _without_metadata(), _traced_places_only(), traced_here():
            exported: ExportedProgram = traced.run_decompositions(_decompositions(traced))
        return exported


def _separate_unread_names(traced: ExportedProgram) -> None:
    """Where a buffer has several names, give the names that the graph does not read a tensor of their own.

    A norm that is registered twice, as in ``Sequential(norm, conv, norm)``, has two names for each buffer: the graph
    has an input for each name, and reads one of them. PyTorch fails to make a graph functional if it changes a tensor
    that is two of its inputs.
    """
    read = {node.name for node in traced.graph.nodes if node.op == "placeholder" and node.users}
    for spec in traced.graph_signature.input_specs:
        if spec.kind == InputKind.BUFFER and spec.arg.name not in read:
            values: dict[str, Any] = traced.state_dict if spec.persistent else traced.constants
            values[str(spec.target)] = torch.empty_like(values[str(spec.target)])  # never written: takes no memory


def _no_autocast(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return a context without the caller's autocast, whose conversions would be part of the program."""
    return torch.autocast(device_of(model).type, enabled=False)


def _decompositions(traced: ExportedProgram) -> dict[Any, Any]:
    """Return operator of the graph -> function that replaces it.

    ``aten.copy``, which export creates, has no derivative. PyTorch refuses operators that are not in the graph.
    """
    own = _targets(traced)
    replacements = {target: function for target, function in REPLACED.items() if target in own}
    return {torch.ops.aten.copy.default: copied, **replacements}


def _targets(traced: ExportedProgram) -> set[Any]:
    """Return all operators and functions that the graph and its nested graphs call."""
    graphs = [module.graph for module in traced.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    return {node.target for graph in graphs for node in graph.nodes if node.op == "call_function"}


def _own_composites_only(traced: ExportedProgram) -> contextlib.AbstractContextManager[None]:
    """Context in which PyTorch preserves only the composite operators that the graph has.

    It would list and patch hundreds at every export, which takes several times as long as a small model's export.
    """
    is_kept = getattr(importlib.import_module("torch._export.utils"), "_is_preservable_cia_op", None)
    if is_kept is None:  # the function is private, and missing in some versions: exports are slower and the same
        return contextlib.nullcontext()
    own = {target for target in _targets(traced) if isinstance(target, torch._ops.OpOverload) and is_kept(target)}
    return patched(importlib.import_module("torch.export.exported_program"), _LISTS_COMPOSITES, lambda: set(own))


@contextlib.contextmanager
def _without_metadata() -> Iterator[None]:
    """Context in which PyTorch does not copy metadata of parameters to each new graph: it is not read here.

    It lists all parameters for each graph: a sixth of the time of AmoebaNet-D (18, 416).
    """
    with contextlib.ExitStack() as modules:
        for name in ("torch.export._trace", "torch.export.exported_program"):
            modules.enter_context(patched(importlib.import_module(name), _NOTES, lambda *_: None))
        yield


def _traced_places_only() -> contextlib.AbstractContextManager[None]:
    """Context in which PyTorch records no stack traces: decomposed nodes keep those of the original nodes.

    PyTorch would walk through all callers for each parameter of each graph: a twentieth of the time.
    """
    return patched(importlib.import_module("torch.fx.config"), "do_not_emit_stack_traces", True)


_NOTES = "_populate_param_buffer_metadata_to_new_gm"
_LISTS_COMPOSITES = "_collect_all_valid_cia_ops"


def _graphs_without_code() -> contextlib.AbstractContextManager[None]:
    """Context in which PyTorch writes and compiles the Python code of a graph only if it is run.

    An export makes about twenty graphs and runs two or three of them; of the last, only the operators are read.
    """
    # Private, too: without it, exports take longer.
    lazy = getattr(importlib.import_module("torch.fx._lazy_graph_module"), "_use_lazy_graph_module", None)
    return contextlib.nullcontext() if lazy is None else lazy(True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's log of a failing graph: the error reports it once."""
    logger, module = logging.getLogger("torch"), importlib.import_module("torch.export._trace")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    vars(module)["print"] = lambda *args, **named: None  # in this module of PyTorch only
    try:
        yield
    finally:
        del vars(module)["print"]
        logger.setLevel(level)


def _parse(exported: ExportedProgram) -> Program:
    """Return the exported graph as a ``Program``."""
    values: dict[str, ValueInfo] = {}
    operators: list[Operator] = []
    outputs: tuple[Any, ...] = ()
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            _declare(values, node.name, node.meta.get("val"))
        elif node.op == "output":
            outputs = tuple(_argument(item) for item in node.args[0])
        # A getitem computes nothing: it names one result of an operator.
        elif node.op == "call_function" and node.target is not operator.getitem:
            operators.append(_operator(node, values))
        # ``get_attr`` is the body of a torch.cond or while_loop: which of its values exist depends on the run.
        elif node.op != "call_function":
            raise RequestError(f"the model has a nested graph ({node.op} {node.target}); control flow is not supported")
    return copying_returned_inputs(_assemble(exported, values, operators, outputs))


def _operator(node: torch.fx.Node, values: dict[str, ValueInfo]) -> Operator:
    """Return a node as an operator; the results of a multi-output node are named by its getitems."""
    result = node.meta.get("val")
    names: list[str | None]
    if isinstance(result, (tuple, list)):
        # A result that is not used has no getitem, and so no name.
        names = [None] * len(result)
        for user in node.users:
            if user.target is operator.getitem:
                names[user.args[1]] = _result_name(user)  # type: ignore[index]
        for name, item in zip(names, result, strict=True):
            if name is not None:
                _declare(values, name, item, node.meta.get("stack_trace"))
    else:
        names = [node.name]
        _declare(values, node.name, result, node.meta.get("stack_trace"))
    _refuse_wrongly_traced(node)
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    function = function_of(node.target, node.args)
    return Operator(
        name=node.name,
        target=node.target if function is None else function,  # type: ignore[arg-type]
        # Of a user's function that a trace has recorded, the third argument, a number in this process, is left out:
        # digests of ranks must be equal.
        args=tuple(_argument(item) for item in (node.args if function is None else node.args[:2])),
        kwargs={key: _argument(item) for key, item in node.kwargs.items() if not _is_device_of_capture(node, key)},
        outputs=tuple(names),
        module=stack[-1][0] if stack else "",
    )


def _refuse_wrongly_traced(node: torch.fx.Node) -> None:
    """Refuse computation with a Python number read from a tensor, and what torch.export traces wrongly."""
    # If an unfolded view of a tensor changes, torch.export keeps only pixels in windows, and adds where these overlap.
    if node.target is torch.ops.aten.unfold_backward.default:
        line = traced_line(node.meta.get("stack_trace") or "")
        raise RequestError(f"it changes a view made by Tensor.unfold in place ({line}); change the tensor by an index")
    for source in node.all_input_nodes:
        # A number that was read from a fake tensor is symbolic: it has no value.
        if isinstance(source.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            line = traced_line(node.meta.get("stack_trace") or "")
            raise RequestError(
                "it takes a value out of a tensor (.item(), float(), int()) and computes with it, which differs from "
                f"image to image{f' ({line})' if line else ''}; compute with the tensor itself"
            )


def _is_device_of_capture(node: torch.fx.Node, key: str) -> bool:
    """Whether an argument is ``device="cpu"`` of a conversion: without it, the result stays on its rank's device.

    The device ``cuda`` is kept, because the tensor that is converted may be on the host.
    """
    if key != "device" or node.target is not torch.ops.aten._to_copy.default:
        return False
    return torch.device(node.kwargs[key]).type == "cpu"  # type: ignore[arg-type]


def _result_name(getitem: torch.fx.Node) -> str:
    """Return the name of a result that several getitems may select: ``max.1`` is the second result of ``max``."""
    source, index = getitem.args[0], getitem.args[1]
    return f"{source.name}.{index}"  # type: ignore[union-attr]


def _declare(values: dict[str, ValueInfo], name: str, value: Any, traced: str | None = None) -> None:
    """Add a value if it is a tensor.

    Args:
        values: gets its shape and dtype.
        name: name of the value.
        value: value of the trace.
        traced: stack of the line that computes it; None: it is an input.

    Raises:
        RequestError: its shape depends on the image's pixels.
    """
    if not isinstance(value, torch.Tensor):
        return
    try:
        # A size without a value raises when it becomes an int.
        shape = tuple(int(side) for side in value.shape)
    except RuntimeError:  # a size that only the image decides
        line = traced_line(traced or "")
        raise RequestError(
            f"the shape of {name!r} depends on the image, as in x[x > 0] or nonzero(){f' ({line})' if line else ''}; "
            f"compute with a mask instead, such as torch.where(x > 0, x, 0), or index by a list of numbers"
        ) from None
    values[name] = ValueInfo(shape, value.dtype)


def _argument(item: Any) -> Any:
    """Return an argument of a node as an ``Operator`` has it: values as ``Ref``, in containers of the same kind."""
    if isinstance(item, torch.fx.Node):
        # A getitem selects one of several results. It becomes no ``Operator``: all results have names of their own.
        return Ref(_result_name(item) if item.target is operator.getitem else item.name)
    # Before lists: a device is a leaf.
    if isinstance(item, torch.device):
        return torch.device(item.type)  # without its index, which differs between ranks: their programs are compared
    if isinstance(item, (list, tuple)):
        parts = [_argument(part) for part in item]
        return tuple(parts) if isinstance(item, tuple) else parts
    return item


def _assemble(
    exported: ExportedProgram, values: dict[str, ValueInfo], operators: list[Operator], outputs: tuple[Any, ...]
) -> Program:
    """Return the program, with inputs and outputs of the graph sorted into parameters, buffers, constants and others.

    Args:
        exported: the exported graph.
        values: shape and dtype of each value.
        operators: operators in their order.
        outputs: outputs of the graph: new values of buffers, then what the model returns.

    Raises:
        RequestError: the model changes a parameter or its input, or computes with what is not a tensor.
    """
    parameters: dict[str, str] = {}
    buffers: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    images: list[str] = []
    for spec in exported.graph_signature.input_specs:
        name = spec.arg.name
        if spec.kind == InputKind.PARAMETER:
            parameters[name] = str(spec.target)
        elif spec.kind == InputKind.BUFFER:
            buffers[name] = str(spec.target)
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            # The user's tensor itself, not a copy: changing it in place between steps changes the program's value, too.
            constants[name] = exported.constants[str(spec.target)]
        elif spec.kind == InputKind.CUSTOM_OBJ:
            raise RequestError(f"it computes with an object that is not a tensor: {exported.constants[spec.target]!r}")
        else:
            images.append(name)
    refuse_fake_constants(constants)
    mutations: dict[str, str] = {}
    returned: list[Any] = []
    for out_spec, output in zip(exported.graph_signature.output_specs, outputs, strict=True):
        # The graph is functional: it returns the new values of buffers before the model's own outputs.
        if out_spec.kind == OutputKind.BUFFER_MUTATION:
            mutations[str(out_spec.target)] = output.name
        elif out_spec.kind == OutputKind.USER_OUTPUT:
            returned.append(output)
        else:
            target = f"the parameter {out_spec.target}" if "PARAMETER" in out_spec.kind.name else str(out_spec.target)
            raise RequestError(
                f"the model changes {target} in its forward ({out_spec.kind.name}); change it between steps under "
                f"torch.no_grad(), or make it a buffer (register_buffer)"
            )
    spec_out = exported.call_spec.out_spec
    assert spec_out is not None
    return Program(
        operators=tuple(operators),
        values=values,
        parameters=parameters,
        buffers=buffers,
        constants=constants,
        image=images[0],
        outputs=tuple(returned),
        mutations=mutations,
        unflatten=lambda leaves: torch.utils._pytree.tree_unflatten(leaves, spec_out),
    )
