"""Segment compiler: joined calls run as ``torch.compile`` makes them, or as they are where it cannot.

Compiled code fuses operators and so rounds differently; the algorithm is the same. It holds no messages, so ranks may
differ in what they compile.

    traced once         per gradient mode and autocast
    compiled once       per graph, shapes and memory formats: equal blocks of a model share their code
    as it is            where tracing or compiling fails (with a warning that says why, once), or nothing is fused
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from hyfi_core.comm.activity import ACTIVITY
from hyfi_core.lowering.joined_calls import FUSED_FROM, JoinedCalls
from hyfi_core.rules.instructions import Instruction, LocalCall, RankProgram

CompileMode = Literal["auto", "off", "on"]
"""Whether segments are compiled: ``auto`` on GPUs, ``on`` also on CPUs."""

BACKEND = "inductor"
"""Backend of ``torch.compile``."""

# Ranks may be threads, but the compiler's settings are those of the process, and while one thread traces, PyTorch
# refuses to run compiled code in any other.
_COMPILING = threading.RLock()
_CODE: dict[Hashable, Callable[..., Any]] = {}  # equal graphs -> compiled code, for all models of the process
_CODES_KEPT = 512
_NORMS = ("batch_norm", "layer_norm", "group_norm")

CompiledFunction = Callable[..., Any]


def why_not_compiled(device: torch.device) -> str | None:
    """Return why this process cannot compile for a device; None if it can."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton is missing or does not support this GPU"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler; install g++, or name one in CXX"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return f"{compiler} cannot find Python.h; install the headers of Python (python3-dev)"
    return None


class SegmentCompiler:
    """Compiles the joined calls of this process's programs, and says once why it does not.

    Attributes:
        segments: number of functions that run compiled.
        compiled: number of different graphs among them.
        seconds: since the start, in which this rank compiled, or waited for other ranks of its process that did.
        left: reason -> number of functions that run as they are.
    """

    def __init__(self) -> None:
        self.segments = self.compiled = 0
        self.seconds = 0.0
        self.left: dict[str, int] = {}

    def compile(self, ranked: RankProgram) -> RankProgram:
        """Return the program with its joined calls compiled when they are first called."""
        return replace(ranked, instructions=tuple(map(self._compile, ranked.instructions)))

    def _compile(self, instruction: Instruction) -> Instruction:
        if isinstance(instruction, LocalCall) and isinstance(instruction.function, JoinedCalls):
            return replace(instruction, function=_CompiledCalls(instruction.function, self))
        return instruction

    def made(self, joined: JoinedCalls, tensors: Sequence[torch.Tensor]) -> tuple[CompiledFunction, Any]:
        """Return (compiled function, its results for ``tensors``); the joined calls if it cannot be compiled."""
        begin = time.perf_counter()
        try:
            with _COMPILING, ACTIVITY.slowly("compiling"):
                return self._made(joined, tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.leave(_reason(error))
        finally:
            self.seconds += time.perf_counter() - begin
        return joined, joined(*tensors)

    def describe(self) -> str | None:
        """Return what was compiled, as text; None if nothing was."""
        if not self.segments:
            return None
        segments = "one segment" if self.segments == 1 else f"{self.segments} segments ({self.compiled} compiled anew)"
        return f"compiled {segments} of the model in {self.seconds:.0f} s"

    def leave(self, reason: str) -> None:
        """Count a function that runs as it is because compilation failed; warn at a new reason."""
        if reason not in self.left:
            warnings.warn(
                f"a segment of the model runs uncompiled on this rank: {reason[:300]}; results are the same, and no "
                f"other rank need do the same",
                stacklevel=2,
            )
        self.left[reason] = self.left.get(reason, 0) + 1

    def _made(self, joined: JoinedCalls, tensors: Sequence[torch.Tensor]) -> tuple[CompiledFunction, Any]:
        graph = _traced(joined, tensors)
        if sum(_is_fused(node) for node in graph.graph.nodes) < FUSED_FROM:
            return joined, joined(*tensors)
        compiled: CompiledFunction | None = None
        key: Hashable = None
        if not any(node.op == "get_attr" for node in graph.graph.nodes):  # otherwise its code is not all
            key = (BACKEND, graph.code, torch.is_grad_enabled(), tuple(map(_described, tensors)))
            compiled = _CODE.get(key)
        function = _compiled(graph) if compiled is None else compiled
        # Backward, too, is compiled at the first call, where a failure can still be avoided.
        with _without_autocast(tensors[0]), torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
            results = function(*tensors)
        if key is not None:
            if len(_CODE) >= _CODES_KEPT:
                _CODE.pop(next(iter(_CODE)))
            _CODE[key] = function
        self.compiled += compiled is None
        self.segments += 1
        return function, results


class _CompiledCalls:
    """Joined calls, compiled when they are first called in a gradient mode and under an autocast."""

    def __init__(self, joined: JoinedCalls, compiler: SegmentCompiler) -> None:
        self._joined = joined
        self._compiler = compiler
        self._made: dict[Hashable, CompiledFunction] = {}

    def __call__(self, *tensors: torch.Tensor) -> Any:
        kind = tensors[0].device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (torch.is_grad_enabled(), cast)
        function = self._made.get(key)
        if function is None:
            self._made[key], results = self._compiler.made(self._joined, tensors)
            return results
        if function is self._joined:
            return function(*tensors)
        try:
            with _COMPILING, _without_autocast(tensors[0]):
                return function(*tensors)
        except torch._dynamo.exc.TorchDynamoException as error:  # new strides, for example, and the compiler failed
            self._compiler.leave(_reason(error))
            self._made[key] = self._joined
            return self._joined(*tensors)


def _reason(error: Exception) -> str:
    """Return the type of an error and its first line, and the next one where that only announces it."""
    first, *lines = str(error).strip().splitlines() or [""]
    announced = f" {lines[0].strip()}" if lines and first.rstrip().endswith(":") else ""  # "backend='…' raised:"
    return f"{type(error).__name__}: {first}{announced}"


def _traced(joined: JoinedCalls, tensors: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Return the graph of joined calls, in which casts of autocast are operators."""
    from torch.fx.experimental.proxy_tensor import make_fx

    alike = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    graph = make_fx(joined.traceable, tracing_mode="fake")(*alike)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _compiled(graph: torch.fx.GraphModule) -> CompiledFunction:
    options: dict[str, Any] | None = None
    if BACKEND == "inductor" and "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        options = {"compile_threads": 1}  # otherwise each rank starts as many processes as there are cores
    function: CompiledFunction = torch.compile(graph, backend=BACKEND, dynamic=False, fullgraph=True, options=options)
    return function


def _without_autocast(like: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Context for a graph that has the casts in it."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def _is_fused(node: torch.fx.Node) -> bool:
    """Whether a compiler fuses an operator: of maps or features, value by value."""
    value = node.meta.get("val")
    value = value[0] if isinstance(value, (tuple, list)) and value else value
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(value, torch.Tensor):
        return False
    pointwise = torch.Tag.pointwise in node.target.tags or any(norm in str(node.target) for norm in _NORMS)
    return pointwise and value.is_floating_point() and value.dim() > 1


def _described(tensor: torch.Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
