"""CUDA graphs on a CPU: operators are noted with their tensors, and repeated on the same memory.

    with fake_graphs(engine):
        engine.train_step(images, labels)        the third step is recorded, the fourth repeats it

So a value that a step takes from the host, or from memory that the caller passes only once, stays what it was when the
step was recorded, as on a GPU. Unlike there, operators also run while they are recorded; their results are then lost,
so that whoever reads them without a replay is noticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hyfi_core.runtime.calls import runners
from hyfi_core.runtime.engine import Engine

_WAITS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")
_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Any]]
"""Operator, its arguments, and what it returned."""


class FakeGraph:
    """A graph of operators; see ``hyfi_core.runtime.calls.step_graph.Graph``."""

    recording: FakeGraph | None = None

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.replays = 0
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._own: set[int] = set()

    def begin(self) -> None:
        assert FakeGraph.recording is None, "a stream is recorded once at a time"
        FakeGraph.recording = self

    def end(self) -> None:
        assert FakeGraph.recording is self
        FakeGraph.recording = None
        with torch.no_grad():
            for tensor, values in self._before.values():
                tensor.copy_(values)
            for call in self.calls:
                for result in _written(call):
                    result.fill_(torch.nan) if result.is_floating_point() else result.zero_()

    def note(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator of the recording thread, and note it."""
        # Without the version counters that autograd checks: a GPU's graphs do not change them either.
        args, kwargs = tree_map_only(torch.Tensor, _data, (args, kwargs))
        for argument, given in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(given)
        for name, given in kwargs.items():
            if any(a.name == name and a.alias_info and a.alias_info.is_write for a in function._schema.arguments):
                self._keep(given)
        result = function(*args, **kwargs)
        noted = [_data(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(result)]
        self.calls.append((function, args, kwargs, noted))
        self._own |= {_storage(leaf) for leaf in _written(self.calls[-1])}
        return result

    def _keep(self, written: Any) -> None:
        """Keep the values of tensors of before that an operator changes: on a GPU, it would not run now."""
        for tensor in tree_leaves(written):
            if isinstance(tensor, torch.Tensor) and _storage(tensor) not in self._own:
                self._before.setdefault(_storage(tensor), (tensor, tensor.clone()))

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for call in self.calls:
                function, args, kwargs, noted = call
                results = [result for result in tree_leaves(function(*args, **kwargs))]
                for to, result in zip(noted, results, strict=True):
                    if any(to is written for written in _written(call)):
                        to.copy_(result)


class _Follower(TorchDispatchMode):
    """Notes the operators of its thread for the graph that is being recorded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        graph = FakeGraph.recording
        if graph is not None and func.__name__.split(".")[0] in _WAITS:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {func}")
        return func(*args, **kwargs) if graph is None else graph.note(func, args, kwargs)


def _data(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data


def _written(call: _Call) -> list[torch.Tensor]:
    """Return the results of a call that have memory of their own: no views, and nothing changed in place."""
    _, args, kwargs, noted = call
    given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    results = [leaf for leaf in noted if isinstance(leaf, torch.Tensor) and _storage(leaf) not in given]
    return [result for result in results if result.untyped_storage().nbytes()]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def fake_graphs(engine: Engine) -> Iterator[list[FakeGraph]]:
    """Context in which an engine on a CPU records its steps; yields the graphs, as they are created."""
    graphs: list[FakeGraph] = []

    def new_graph() -> FakeGraph:
        graphs.append(FakeGraph())
        return graphs[-1]

    @contextlib.contextmanager
    def recording() -> Iterator[Callable[[], FakeGraph]]:
        yield new_graph

    replayed, before = engine._replayed, runners.as_in_this_thread
    replayed._recording = recording  # type: ignore[method-assign]
    replayed._may_record = True
    runners.as_in_this_thread = lambda device: lambda: _Follower().__enter__()  # type: ignore[func-returns-value]
    try:
        with _Follower():
            yield graphs
    finally:
        runners.as_in_this_thread = before
