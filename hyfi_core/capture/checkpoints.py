"""``torch.utils.checkpoint`` during capture: a plain call, because the plan decides what is recomputed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint as checkpointing

from hyfi_core.capture.patching import patched

# PyTorch's own, read at import before any patch: threads that do not trace use these.
_FUNCTION: Any = checkpointing.CheckpointFunction
_GENERATOR: Any = checkpointing._checkpoint_without_reentrant_generator

Inside = Callable[[], contextlib.AbstractContextManager[Any] | None]


@contextlib.contextmanager
def plain_checkpoints(inside: Inside) -> Iterator[None]:
    """Context in which checkpoints simply call the wrapped function. It patches PyTorch: one thread at a time.

    Args:
        inside: creates the context of a checkpoint; returns None in threads that do not trace.
    """

    # ``checkpoint(use_reentrant=True)`` only calls ``apply`` of this class.
    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            context = inside()
            if context is None:
                return _FUNCTION.apply(function, preserve, *args)
            with context:
                return function(*args)

    # ``checkpoint(use_reentrant=False)`` calls the function where this generator yields, once.
    def without_reentrance(*args: Any, **kwargs: Any) -> Iterator[None]:
        """Yield once, as PyTorch's generator of this name does, without its hooks that recompute."""
        context = inside()
        if context is None:
            yield from _GENERATOR(*args, **kwargs)
            return
        with context:
            yield

    with (
        patched(checkpointing, "CheckpointFunction", Reentrant),
        patched(checkpointing, "_checkpoint_without_reentrant_generator", without_reentrance),
    ):
        yield
