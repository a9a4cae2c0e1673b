"""Hooks that the user has registered on parameters, run once on the reduced gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hyfi_core.errors import RequestError


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
        self._held: list[tuple[nn.Parameter, Any, list[Any], Any, list[Any]]] = []
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
            self._held.append((parameter, before, [*(before or {}).items()], after, [*(after or {}).items()]))

    def __enter__(self) -> None:
        """Suspend them."""
        for _, before, _, after, _ in self._held:
            for hooks in (before, after):
                if hooks is not None:
                    # Emptied in place: the user's handles hold weak references to these dicts, to remove from them.
                    hooks.clear()

    def __exit__(self, *raised: object) -> None:
        """Register them again, in the original order."""
        for _, before, held_before, after, held_after in self._held:
            for hooks, removed in ((before, held_before), (after, held_after)):
                if hooks is not None:
                    hooks.update(removed)

    def change(self) -> None:
        """Run hooks that change a gradient, after its reduction and before accumulation."""
        for parameter, _, hooks, _, _ in self._held:
            gradient = parameter.grad
            for _, hook in hooks if gradient is not None else ():
                changed = hook(gradient)
                if changed is not None and gradient is not None:
                    # Into the same memory: it may be a view of a bucket.
                    gradient.copy_(changed)

    def end(self) -> None:
        """Run post-accumulate hooks."""
        for parameter, _, _, _, hooks in self._held:
            for _, hook in hooks:
                if parameter.grad is not None:
                    hook(parameter)
