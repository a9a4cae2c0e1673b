"""Python code of exported graphs, made when somebody runs it and not before.

Each pass of an export has a graph's code generated and compiled anew, eighteen times in all, and nearly nobody runs it:
passes go through the graph itself. That was a fifth of the capture of a ResNet-1001.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

_CODE = ("forward", "_code", "_lineno_map", "_prologue_start")
"""What making the code sets on a module or on its class, and what is made when somebody looks at it."""
_SPECS = ("_in_spec", "_out_spec")
"""What it takes over from the graph, at no cost."""
_CALLS = ("_wrapped_call", "__call__")
"""What it sets besides, for kinder messages where a call fails."""


@contextlib.contextmanager
def code_when_run() -> Iterator[None]:
    """Let the graph modules of an export wait with their code for somebody who looks at it.

    Where this PyTorch makes it otherwise than is known here, nothing is changed. It changes a class of PyTorch's: one
    thread at a time.
    """
    if not _known():
        yield
        return
    plain = fx.GraphModule.recompile
    fx.GraphModule.recompile = _waiting(plain)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        fx.GraphModule.recompile = plain  # type: ignore[method-assign]


def _known() -> bool:
    """Whether making a module's code sets what is known here, and nothing else."""
    try:
        module = _trial()
        bare = {*vars(type("Bare", (fx.GraphModule,), {})), *vars(torch.nn.Module()), "_graph"}
        for holder in (type(module), module):
            for name in {*vars(holder)} - bare:
                delattr(holder, name)
        module.recompile()
        made = {*vars(type(module)), *vars(module)} - bare
        specs = _specs(module)
    except Exception:  # its insides are others
        return False
    same = all(getattr(module, name) is specs[name] for name in _SPECS)
    return _alone(module) and same and "forward" in made and made <= {*_CODE, *_SPECS, *_CALLS}


def _trial() -> fx.GraphModule:
    """Return a module with a graph such as exports have."""
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    spec = torch.utils._pytree.tree_structure(0)
    graph.set_codegen(fx.graph._PyTreeCodeGen(fx.graph._PyTreeInfo(["x"], spec, spec)))
    return fx.GraphModule(torch.nn.Module(), graph)


def _alone(module: fx.GraphModule) -> bool:
    """Whether the module has a class to itself, on which something can be put that is for it alone."""
    return type(module).__qualname__.endswith(".GraphModuleImpl")


def _specs(module: fx.GraphModule) -> dict[str, Any]:
    """Return how the arguments and results of the module's graph are put together, if the graph says so."""
    info = getattr(module.graph._codegen, "pytree_info", None)
    return {} if info is None else {"_in_spec": info.in_spec, "_out_spec": info.out_spec}


class _Late:
    """Stands on the class of one module for what making its code sets: a look at it has the code made."""

    def __init__(self, name: str, make: Callable[[Any], Any]) -> None:
        self._name = name
        self._make = make

    def __get__(self, module: Any, owner: type[Any]) -> Any:
        if module is None:
            return self
        for name in _CODE:
            if isinstance(vars(owner).get(name), _Late):
                delattr(owner, name)
        self._make(module)
        return getattr(module, self._name)


def _waiting(plain: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return what marks a module's code as out of date, whether it was made before or not."""

    def recompile(module: Any) -> None:
        if not _alone(module):
            plain(module)
            return
        vars(module).update(_specs(module))
        for name in _CODE:
            vars(module).pop(name, None)
            setattr(type(module), name, _Late(name, plain))
        module._recompile_submodules()

    return recompile
