"""Segment compiler: joined calls run as ``torch.compile`` makes them, or as they are where it cannot.

Compiled code fuses operators and so rounds differently; the algorithm is the same. It holds no messages, so ranks may
differ in what they compile, and in when they begin to use it.

    traced once         per gradient mode, autocast and layout of the inputs
    compiled once       per graph, shapes and memory formats: equal blocks of a model share their code
    as it is            until it is compiled in the background, or where tracing or compiling fails (with a warning
                        that says why, once), or nothing is fused, or backward runs once for each output
"""

from __future__ import annotations

import contextlib
import sysconfig
import threading
import time
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from hyfi_core.comm.activity import ACTIVITY
from hyfi_core.lowering.compiling.background import BackgroundBatch, reason
from hyfi_core.lowering.compiling.graph_job import CompiledFunction, GraphJob, InputFacts, Traced, traced
from hyfi_core.lowering.compiling.known_jobs import cached_on_disk, compiled_before, mark
from hyfi_core.lowering.joined_calls import JoinedCalls
from hyfi_core.rules.instructions import Instruction, LocalCall, RankProgram

CompileMode = Literal["auto", "off", "on"]
"""Whether segments are compiled: ``auto`` on GPUs, ``on`` also on CPUs."""

# Ranks may be threads, but the compiler's settings are those of the process.
_COMPILING = threading.RLock()
_CODE: dict[Hashable, CompiledFunction] = {}  # equal graphs -> compiled code, for all models of the process
_CODES_KEPT = 512
_LAYOUTS_KEPT = 8
"""Layouts of inputs for which a segment is compiled; beyond them it runs as it is."""


_UNCOMPILED: ContextVar[bool] = ContextVar("uncompiled", default=False)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Context in which segments run as they are: the backward of compiled code runs once, and reuses what was saved."""
    before = _UNCOMPILED.set(True)
    try:
        yield
    finally:
        _UNCOMPILED.reset(before)


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


def forget_code() -> None:
    """Forget the compiled code of this process; that on disk stays."""
    _CODE.clear()


@dataclass(frozen=True)
class _CompileRequest:
    """A request to compile joined calls, for these inputs and this mode of autograd and autocast."""

    calls: _CompiledCalls
    key: Hashable
    inputs: tuple[InputFacts, ...]
    grad: bool
    cast: torch.dtype | None


_TracedRequest = tuple[_CompileRequest, Traced]
_GraphAndCalls = tuple[GraphJob, list[_TracedRequest]]
"""What one job compiles, with all calls that wait for it."""


class SegmentCompiler:
    """Compiles the joined calls of this process's programs, and says what it does, and once why it does not.

    Attributes:
        segments: number of functions that run compiled.
        compiled: number of different graphs among them that were not in this process before.
        seconds: time that this rank has spent on tracing, compiling, loading, or waiting for other ranks of its process
            that did; without that of child processes.
        left: reason -> number of functions that run uncompiled.
    """

    def __init__(self) -> None:
        self.segments = self.compiled = 0
        self.seconds = 0.0
        self.left: dict[str, int] = {}
        self._background = False
        self._requests: list[_CompileRequest] = []  # for the next batch
        self._batch: BackgroundBatch | None = None  # that child processes compile now
        self._jobs: list[_GraphAndCalls] = []  # of this batch
        self._news: list[str] = []  # not told yet
        self._reported = 0  # segments of which the news has told

    def work_in_background(self) -> None:
        """Let child processes compile from now on, while segments run uncompiled; by default their first call compiles.

        Between two calls of the model, compiled code that is ready takes over: at which step depends on time.
        """
        self._background = cached_on_disk()

    def compile(self, ranked: RankProgram) -> RankProgram:
        """Return the program with its joined calls compiled when they are first called, or some calls later."""
        return replace(ranked, instructions=tuple(map(self._compile, ranked.instructions)))

    def _compile(self, instruction: Instruction) -> Instruction:
        if isinstance(instruction, LocalCall) and isinstance(instruction.function, JoinedCalls):
            return replace(instruction, function=_CompiledCalls(instruction.function, self))
        return instruction

    def function(self, request: _CompileRequest) -> CompiledFunction:
        """Return what runs these calls now: compiled code, or the joined calls as they are.

        Joined calls stay for good if they cannot be compiled, else until child processes have compiled them.
        """
        # In the background, the request is only noted: this call is in the middle of a step.
        if self._background:
            self._requests.append(request)
            return request.calls.joined
        with self._timed(), _COMPILING:
            graph = self._traced(request)
            function = None if graph is None else self._loaded(graph.job, 1)
            return request.calls.joined if graph is None or function is None else graph.bound(function)

    def change_over(self) -> None:
        """Between two calls of the model: begin to use what child processes have compiled, and start new ones."""
        if self._batch is not None and (finished := self._batch.finished()):
            with self._timed(), _COMPILING:
                for index, failure in finished.items():
                    self._take(*self._jobs[index], failure)
            if not self._batch.left:
                self._news.append(f"{self._counted()} in {time.monotonic() - self._batch.began_s:.0f} s")
                self._batch = None
        if self._batch is None and self._requests:
            with self._timed(), _COMPILING:
                self._begin()

    @property
    def idle(self) -> bool:
        """Whether nothing is being compiled, and nothing waits for it."""
        return self._batch is None and not self._requests

    def news(self) -> str | None:
        """Return what has happened since the last call, as text; None if nothing has."""
        if not self._background and self.segments > self._reported:  # compiled by the calls themselves
            self._reported = self.segments
            self._news.append(f"{self._counted()} in {self.seconds:.0f} s")
        text = "; ".join(self._news) or None
        self._news = []
        return text

    def describe(self) -> str | None:
        """Return what was compiled, as text; None if nothing was."""
        return f"{self._counted()} in {self.seconds:.0f} s" if self.segments else None

    def leave(self, why: str) -> None:
        """Count a function that runs as it is because compilation failed; warn at a new reason."""
        if why not in self.left:
            warnings.warn(
                f"a segment of the model runs uncompiled on this rank: {why[:300]}; results are the same, and no "
                f"other rank need do the same",
                stacklevel=2,
            )
        self.left[why] = self.left.get(why, 0) + 1

    def _begin(self) -> None:
        """Trace the calls of all requests, load those that are compiled already, and start children for the rest."""
        begin, before = time.monotonic(), self.segments
        jobs: dict[Hashable, _GraphAndCalls] = {}
        for request in self._requests:
            if (graph := self._traced(request)) is None:
                continue
            # What is compiled already is loaded here: children are only for what has to be compiled.
            if graph.job.key in _CODE or compiled_before(graph.job):
                self._take(graph.job, [(request, graph)], None)
            else:
                jobs.setdefault(graph.job.key, (graph.job, []))[1].append((request, graph))
        self._requests, self._jobs = [], [*jobs.values()]
        if self.segments > before:
            seconds = time.monotonic() - begin
            self._news.append(f"{_segments(self.segments - before)} of the model loaded in {seconds:.0f} s")
        if not self._jobs:
            return
        try:
            self._batch = BackgroundBatch([job for job, _ in self._jobs])
        except OSError as error:  # no memory for a process, no room for a temporary file
            for job, requests in self._jobs:
                self._take(job, requests, f"no process to compile it could be started: {reason(error)}")
            return
        count, processes = sum(len(requests) for _, requests in self._jobs), self._batch.children
        self._news.append(
            f"compiling {_segments(count)} of the model ({len(self._jobs)} different) in the background, in "
            f"{processes} {'process' if processes == 1 else 'processes'}; until then they run as they are"
        )

    def _traced(self, request: _CompileRequest) -> Traced | None:
        try:
            return traced(request.calls.joined, request.inputs, request.grad, request.cast)
        except Exception as error:
            self.leave(reason(error))
        return None

    def _take(self, job: GraphJob, requests: Sequence[_TracedRequest], failure: str | None) -> None:
        """Let the calls that wait for ``job`` run compiled; ``failure``: why it could not be compiled, or None."""
        if failure is not None:
            for _ in requests:
                self.leave(failure)
            return
        # From the disk, where the child has put it; if it is gone again, this process compiles.
        function = self._loaded(job, len(requests))
        for request, graph in requests:
            request.calls.use(request.key, request.calls.joined if function is None else graph.bound(function))

    def _loaded(self, job: GraphJob, calls: int) -> CompiledFunction | None:
        """Return the function of a job that ``calls`` segments wait for; None if it cannot be compiled."""
        function = _CODE.get(job.key)
        try:
            if function is None:
                function = job.compiled()
                self.compiled += 1
                mark(job)
        except Exception as error:
            for _ in range(calls):
                self.leave(reason(error))
            return None
        # Dicts keep their order: the first is the oldest.
        if len(_CODE) >= _CODES_KEPT:
            _CODE.pop(next(iter(_CODE)))
        _CODE[job.key] = function
        self.segments += calls
        return function

    def _counted(self) -> str:
        anew = f" ({self.compiled} compiled anew)" if self.segments > 1 else ""
        return f"compiled {_segments(self.segments)}{anew} of the model"

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Context whose time counts as compiling."""
        begin = time.perf_counter()
        try:
            with ACTIVITY.slowly("compiling"):
                yield
        finally:
            self.seconds += time.perf_counter() - begin


class _CompiledCalls:
    """Joined calls that run as they are until a compiled function takes their place.

    Attributes:
        joined: the calls as they are, uncompiled.
    """

    def __init__(self, joined: JoinedCalls, compiler: SegmentCompiler) -> None:
        self.joined = joined
        self._compiler = compiler
        self._functions: dict[Hashable, CompiledFunction] = {}

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Return the results of the calls; at a new layout of the inputs, ask for compiled code, once."""
        if _UNCOMPILED.get():
            return self.joined(*tensors)
        kind = tensors[0].device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        grad = torch.is_grad_enabled()
        # Shapes and dtypes follow from the program; how a neighbouring operator lays its result out does not.
        key = (grad, cast, *((tensor.stride(), tensor.requires_grad) for tensor in tensors))
        function = self._functions.get(key)
        if function is None:
            function = self.joined
            if len(self._functions) < _LAYOUTS_KEPT:
                request = _CompileRequest(self, key, tuple(map(InputFacts.of, tensors)), grad, cast)
                function = self._compiler.function(request)
            # Noted even if it is the plain function: the request is made once.
            self._functions[key] = function
        if function is self.joined or cast is None:
            return function(*tensors)
        with torch.autocast(kind, enabled=False):  # the graph has the casts in it
            return function(*tensors)

    def use(self, key: Hashable, function: CompiledFunction) -> None:
        """Run as a function from now on, for inputs of a key."""
        self._functions[key] = function


def _segments(count: int) -> str:
    return "one segment" if count == 1 else f"{count} segments"
