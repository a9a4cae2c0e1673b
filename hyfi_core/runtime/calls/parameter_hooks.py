"""Hooks that the user has registered on parameters, run once on the reduced gradients."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hyfi_core.errors import RequestError


@dataclass(frozen=True, eq=False)
class _HookDict:
    """One of PyTorch's two dicts of a parameter's hooks, and its content: (id of the handle, hook), in order."""

    parameter: nn.Parameter
    live: MutableMapping[int, Any]
    hooks: list[tuple[int, Any]]


class ParameterHooks:
    """The user's parameter hooks, suspended in this context during backward and run on the reduced gradients.

    Hooks may be non-linear: the clamp of a sum is not the sum of clamps. One process calls hooks once for each
    backward, so they are supported only with a single micro-batch.

    Args:
        named: parameters by name.
        backwards: number of backwards that one process would run in this step: micro-batches times replicas.

    Raises:
        RequestError: there are hooks, and several backwards.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], backwards: int) -> None:
        self._before_accumulation: list[_HookDict] = []
        self._after_accumulation: list[_HookDict] = []
        for name, parameter in named.items():
            before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            if not before and not after:
                continue
            if backwards > 1:
                raise RequestError(
                    f"{name!r} has a gradient hook, which a single process would call once for each of {backwards} "
                    f"micro-batches; use one micro-batch and one replica, or change gradients between "
                    f"engine.accumulate "
                    "and engine.update"
                )
            self._before_accumulation += [_HookDict(parameter, before, [*before.items()])] if before else []
            self._after_accumulation += [_HookDict(parameter, after, [*after.items()])] if after else []

    def __enter__(self) -> None:
        """Suspend the hooks."""
        for suspended in (*self._before_accumulation, *self._after_accumulation):
            # Emptied in place: the user's handles hold weak references to these dicts, to remove from them.
            suspended.live.clear()

    def __exit__(self, *raised: object) -> None:
        """Register the hooks again, in the original order."""
        for suspended in (*self._before_accumulation, *self._after_accumulation):
            suspended.live.update(suspended.hooks)

    def run_on_new_gradients(self) -> None:
        """Run hooks that change a gradient: once it is reduced, before it is added to those of earlier calls."""
        for suspended in self._before_accumulation:
            gradient = suspended.parameter.grad
            if gradient is None:
                continue
            for _, hook in suspended.hooks:
                changed = hook(gradient)
                if changed is not None:
                    # Into the same memory: it may be a view of a bucket.
                    gradient.copy_(changed)

    def run_after_accumulation(self) -> None:
        """Run post-accumulate hooks."""
        for suspended in self._after_accumulation:
            for _, hook in suspended.hooks:
                if suspended.parameter.grad is not None:
                    hook(suspended.parameter)
