"""Graph jobs: a graph and facts of its inputs, all that a process needs to compile it: no model and no values.

this process      joined calls ──trace──▶ graph job ──compile──▶ function
a child process                               └─────compile──▶ Inductor's cache on disk
this process                                                          └──load──▶ function

The cache is keyed by all that code depends on, so a process finds there only what it would compile itself.
"""

from __future__ import annotations

import contextlib
import copyreg
import hashlib
import os
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config

from hyfi_core.lowering.joined_calls import FUSED_FROM, JoinedCalls

BACKEND: str | Callable[..., Any] = "inductor"
"""Backend of ``torch.compile``."""
CompiledFunction = Callable[..., Any]
_NORMS = ("batch_norm", "layer_norm", "group_norm")


@dataclass(frozen=True)
class InputFacts:
    """Facts of an input on which compiled code depends."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> InputFacts:
        """Return the facts of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        """Return a tensor of these facts."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class GraphJob:
    """A graph to compile.

    Attributes:
        graph: a ``torch.fx.GraphModule`` of ATen operators, pickled.
        code: code of the graph, in Python; equal for equal graphs, unlike the bytes.
        inputs: facts of its inputs.
        grad: whether gradients are computed.
    """

    graph: bytes
    code: str
    inputs: tuple[InputFacts, ...]
    grad: bool

    @property
    def key(self) -> Hashable:
        """Equal for jobs whose compiled code is the same."""
        return BACKEND, self.code, self.grad, self.inputs

    @property
    def digest(self) -> str:
        """Digest of the job, of PyTorch and of the device: the same in later runs."""
        device = next((facts.device for facts in self.inputs if facts.device.type == "cuda"), None)
        name = "" if device is None else torch.cuda.get_device_name(device)
        # Threads, too: code for CPUs has their number in it.
        parts = (self.code, self.grad, self.inputs, torch.__version__, name, torch.get_num_threads(), arithmetic())
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def compiled(self) -> CompiledFunction:
        """Return the graph as compiled code, forward and backward; from the cache on disk if it is there."""
        from torch._dynamo.backends.registry import lookup_backend
        from torch._guards import TracingContext, tracing

        backend = lookup_backend(BACKEND) if isinstance(BACKEND, str) else BACKEND
        mode = _fake_mode()
        # Fake tensors: compiling needs shapes and strides, not memory.
        with mode:
            inputs = [facts.empty() for facts in self.inputs]
        graph = pickle.loads(self.graph)
        # Backward, too, is compiled here, where a failure can still be avoided.
        early = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
        with (
            torch.set_grad_enabled(self.grad),
            tracing(TracingContext(mode)),
            early,
            _in_one_process(),
            same_keys(),
        ):
            function: CompiledFunction = backend(graph, inputs)
        return function


@dataclass(frozen=True)
class Traced:
    """Joined calls as a graph.

    Attributes:
        job: the graph to compile.
        constants: its last inputs: tensors that the calls hold, such as the shares of ranks in a mean.
    """

    job: GraphJob
    constants: tuple[torch.Tensor, ...]

    def bound(self, function: CompiledFunction) -> CompiledFunction:
        """Return compiled code as a function of the inputs of the calls."""
        constants = self.constants
        return (lambda *tensors: function(*tensors, *constants)) if constants else function


def traced(joined: JoinedCalls, inputs: Sequence[InputFacts], grad: bool, cast: torch.dtype | None) -> Traced | None:
    """Return joined calls as a graph, in which casts of autocast are operators; None if it fuses nothing.

    Args:
        joined: the calls.
        inputs: facts of their inputs.
        grad: whether gradients are computed.
        cast: dtype of autocast; None without.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with _fake_mode():
        fake_inputs = [facts.empty() for facts in inputs]
    # Casts are recorded as operators, so that the compiled code runs without autocast.
    casting = torch.autocast(inputs[0].device.type, dtype=cast, enabled=cast is not None)
    with torch.set_grad_enabled(grad), casting:
        graph = make_fx(joined.traceable, tracing_mode="fake")(*fake_inputs)
    graph.graph.eliminate_dead_code()
    constants = _moved_to_inputs(graph)
    graph.recompile()
    if sum(_is_fused(node) for node in graph.graph.nodes) < FUSED_FROM:
        return None
    every_input = (*inputs, *map(InputFacts.of, constants))
    return Traced(GraphJob(pickle.dumps(graph), graph.code, every_input, grad), constants)


def _moved_to_inputs(graph: torch.fx.GraphModule) -> tuple[torch.Tensor, ...]:
    """Turn the tensors that a graph holds into its last inputs, and return these tensors.

    Code that contains tensors belongs to one segment: equal segments could not share it, no child could compile it.
    """
    nodes = graph.graph.nodes
    last = [node for node in nodes if node.op == "placeholder"][-1]
    inputs: dict[str, torch.fx.Node] = {}
    # A list first: nodes are erased in the loop.
    for node in [node for node in nodes if isinstance(_held(graph, node), torch.Tensor)]:
        if node.target not in inputs:
            with graph.graph.inserting_after(last):
                last = inputs[node.target] = graph.graph.placeholder(f"constant_{len(inputs)}")
            last.meta = dict(node.meta)
        node.replace_all_uses_with(inputs[node.target])
        graph.graph.erase_node(node)
    constants = tuple(getattr(graph, name) for name in inputs)
    for name in inputs:
        delattr(graph, name)
    return constants


def _held(graph: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
    """Return the attribute of the graph that a node reads, such as a tensor; None for other nodes."""
    return getattr(graph, str(node.target), None) if node.op == "get_attr" else None


def arithmetic() -> dict[Hashable, Any]:
    """Return PyTorch's settings of this process that compiled code depends on: Inductor's cache is keyed by them."""
    settings: dict[Hashable, Any] = {
        "default_dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
    }
    return settings | {(place, name): getattr(of, name) for place, of, name in _precisions() if hasattr(of, name)}


def take_over_arithmetic(settings: Mapping[Hashable, Any]) -> None:
    """Set PyTorch's settings to those that ``arithmetic`` returned in another process."""
    torch.set_default_dtype(settings["default_dtype"])
    torch.use_deterministic_algorithms(settings["deterministic"])
    torch.backends.cudnn.benchmark = settings["benchmark"]
    for place, of, name in _precisions():
        if (place, name) in settings and getattr(of, name) != settings[place, name]:
            setattr(of, name, settings[place, name])


def _precisions() -> list[tuple[str, Any, str]]:
    """Return PyTorch's precision settings on GPUs, as (what they are for, object that has the setting, attribute)."""
    # PyTorch since 2.9 has ``fp32_precision`` instead of ``allow_tf32``.
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    by_name = hasattr(products, "fp32_precision")
    precision = "fp32_precision" if by_name else "allow_tf32"
    return [
        ("products", products, precision),
        ("products", products, "allow_bf16_reduced_precision_reduction"),
        ("convolutions", convolutions.conv if by_name else convolutions, precision),  # type: ignore[attr-defined]
    ]


@contextlib.contextmanager
def same_keys() -> Iterator[None]:
    """Context in which keys of Inductor's cache do not depend on what a process has imported first.

    Keys are digests of pickles. Pickle writes a memory format as ``torch.contiguous_format`` of a module: of the first
    one in ``sys.modules`` that has the name ``torch``. This may be a module that imports torch and is itself still
    being imported, or was loaded by hand, as pytest does. A child does not have that module, so it would fill the cache
    under keys that this process never looks up.
    """
    before = copyreg.dispatch_table.get(torch.memory_format)
    # Written as ``contiguous_format``, which pickle finds in torch itself.
    copyreg.pickle(torch.memory_format, lambda value: str(value).removeprefix("torch."))
    try:
        yield
    finally:
        del copyreg.dispatch_table[torch.memory_format]
        if before is not None:
            copyreg.dispatch_table[torch.memory_format] = before


def _fake_mode() -> Any:
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())  # caches on disk need a ShapeEnv


def _in_one_process() -> contextlib.AbstractContextManager[Any]:
    """Context in which Inductor starts no processes: each rank would start as many as there are cores."""
    if BACKEND != "inductor" or "TORCHINDUCTOR_COMPILE_THREADS" in os.environ:
        return contextlib.nullcontext()
    import torch._inductor.config

    patch: contextlib.AbstractContextManager[Any] = torch._inductor.config.patch(compile_threads=1)
    return patch


def _is_fused(node: torch.fx.Node) -> bool:
    """Whether a compiler fuses a node: an operator on maps or features that works value by value, or a norm."""
    value = node.meta.get("val")
    value = value[0] if isinstance(value, (tuple, list)) and value else value
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(value, torch.Tensor):
        return False
    pointwise = torch.Tag.pointwise in node.target.tags or any(norm in str(node.target) for norm in _NORMS)
    return pointwise and value.is_floating_point() and value.dim() > 1
