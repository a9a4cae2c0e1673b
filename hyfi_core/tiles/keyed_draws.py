"""Random numbers of an encoder that depend on the tile alone: the same in both passes, in any chunk, on any rank.

::

    one call of the encoder for tiles 6, 7, 8        dropout of (3, 197, 384)
        tile 6   hash(seed, step, slide, operator; positions of tile 6)
        tile 7   hash(seed, step, slide, operator; positions of tile 7)
        tile 8   …

An operator that draws is replaced by one that hashes (`hyfi_core.ops.draws`). The dim of tiles is found by comparing
the drawn shape with that in a call for a single tile. So dropout and drop-path of any module draw the same numbers
however tiles are divided into calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyfi_core.capture.interpret import arguments_of, may_draw
from hyfi_core.errors import RequestError
from hyfi_core.ops import draws

DrawnShape = tuple[int, ...]
"""Shape of the random numbers that an operator draws."""
# Operators that fill a tensor, and operators that make one: name -> (function that draws instead, its arguments).
_FILLS: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    "bernoulli_": (draws.bernoulli, ("p",)),
    "uniform_": (draws.uniform, ("from", "to")),
    "normal_": (draws.normal, ("mean", "std")),
    "log_normal_": (draws.log_normal, ("mean", "std")),
    "exponential_": (draws.exponential, ("lambd",)),
    "cauchy_": (draws.cauchy, ("median", "sigma")),
    "geometric_": (draws.geometric, ("p",)),
}
_MAKES: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    "rand": (draws.uniform, ()),
    "randn": (draws.normal, ()),
    "randint": (draws.integers, ("low", "high")),
    "rand_like": (draws.uniform, ()),
    "randn_like": (draws.normal, ()),
    "randint_like": (draws.integers, ("low", "high")),
}


@dataclass(frozen=True)
class DrawKey:
    """What the random numbers of a call depend on, besides tile and operator.

    Attributes:
        seed: seed of the run.
        step: number of the training step.
        slide: number of the slide in the whole step, over all replicas.
    """

    seed: int
    step: int
    slide: int


class KeyedDraws(TorchDispatchMode):
    """Context of one call of an encoder, or of an aggregator, in which all random numbers are keyed.

    Args:
        key: see `DrawKey`.
        what: "encoder" or "aggregator", for messages.
        tiles: numbers of the tiles in the call; None: the call is for a whole slide.
        single: the shapes drawn in a call for a single tile, in order; None for such a call itself.

    Attributes:
        shapes: shapes of the numbers drawn so far, in order.
    """

    def __init__(
        self, key: DrawKey, what: str, tiles: Sequence[int] | None = None, single: Sequence[DrawnShape] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._key, self._what, self._single = key, what, single
        self._tiles = None if tiles is None else list(tiles)
        self.shapes: list[DrawnShape] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, or draw its numbers."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **kwargs)
        arguments = arguments_of(function, args, kwargs)
        name = function._schema.name.removeprefix("aten::")
        if not may_draw(function, arguments):
            return function(*args, **kwargs)
        if arguments.get("generator") is not None:
            raise self._refusal(name, "draws from a torch.Generator of its own", "draw without one")
        return self._drawn(function, name, arguments)

    def _drawn(self, function: Any, name: str, arguments: dict[str, Any]) -> Any:
        """Return the result of an operator that draws, with keyed numbers; ``arguments``: name -> argument.

        Raises:
            RequestError: its numbers cannot be the same for any division into calls.
        """
        if name == "native_dropout":
            return self._dropout(arguments["input"], arguments["p"], arguments["train"])
        if name in _FILLS:  # in place
            draw, names = _FILLS[name]
            return arguments["self"].copy_(self._numbers(draw, arguments["self"], *(arguments[n] for n in names)))
        if name == "random_":
            limits = [arguments[n] for n in ("from", "to") if arguments.get(n) is not None]
            draw = draws.integers if limits else draws.any_integers
            return arguments["self"].copy_(self._numbers(draw, arguments["self"], *limits))
        if name == "bernoulli":
            like = arguments["self"]
            return self._numbers(draws.bernoulli, like, arguments.get("p", like))
        if name in _MAKES:  # returns a new tensor
            draw, names = _MAKES[name]
            return self._numbers(draw, _like(arguments), *(arguments[n] for n in names if n in arguments))
        if name == "randperm" and self._tiles is None:
            like = torch.empty(
                arguments["n"], dtype=arguments["dtype"] or torch.int64, device=arguments["device"] or "cpu"
            )
            return self._numbers(draws.permutation, like)
        other = "attention without dropout, or its eager implementation" if "attention" in name else "dropout or rand"
        raise self._refusal(
            name, f"calls aten.{name}, whose numbers depend on the other tiles of a call", f"use {other}"
        )

    def _dropout(self, x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (result, mask of the values that stay), as ``native_dropout``."""
        if train is False or p == 0.0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        mask = self._numbers(draws.bernoulli, torch.empty_like(x, dtype=torch.bool), 1.0 - p)
        return x * (mask.to(x.dtype) * (0.0 if p == 1.0 else 1.0 / (1.0 - p))), mask

    def _numbers(self, draw: Callable[..., torch.Tensor], like: torch.Tensor, *parameters: Any) -> torch.Tensor:
        """Return numbers of the shape and dtype of ``like``, keyed by the tiles that they belong to."""
        shape = tuple(like.shape)
        # The number of the draw within its call stands for the operator: it is the same in each call.
        key = draws.mixed(self._key.seed, self._key.step, self._key.slide, len(self.shapes))
        where = self._positions(shape, like.device)
        self.shapes.append(shape)
        detached = [p.detach() if isinstance(p, torch.Tensor) else p for p in parameters]
        return draw(key, where, like.dtype, *detached).reshape(shape)

    def _positions(self, shape: DrawnShape, device: torch.device) -> torch.Tensor:
        """Return a position for each number: those of tile 0 first, then those of tile 1, … of the whole slide."""
        if self._tiles is None:  # of a whole slide
            return _all_positions(shape, device)
        tiles = torch.tensor(self._tiles, device=device)
        if self._single is None:  # of one tile, or of none: all numbers are its own
            return _all_positions(shape, device) + tiles * prod(shape)
        dim = self._dim_of_tiles(shape)
        single_shape = (*shape[:dim], shape[dim] // len(self._tiles), *shape[dim + 1 :])
        within_tile = _all_positions(single_shape, device)
        before_tile = tiles * prod(single_shape)
        # Broadcast over a dim of tiles in front of `dim`, then merged with it.
        return (within_tile.unsqueeze(dim) + before_tile.view(-1, *[1] * (len(shape) - dim))).reshape(shape)

    def _dim_of_tiles(self, shape: DrawnShape) -> int:
        """Return the dim of drawn numbers that runs over the tiles of a call."""
        assert self._single is not None and self._tiles is not None
        number, count = len(self.shapes), len(self._tiles)
        single_shape = self._single[number] if number < len(self._single) else ()
        # The dim that is `count` times as large as for a single tile, while all others are equal. If numbers are drawn
        # once for a whole call, there is none.
        dims = []
        if len(single_shape) == len(shape):
            dims = [
                d
                for d in range(len(shape))
                if shape == (*single_shape[:d], single_shape[d] * count, *single_shape[d + 1 :])
            ]
        if not dims:
            raise self._refusal(
                f"value {number} of shape {shape}",
                f"draws numbers of shape {shape} for {count} tiles and {single_shape} for one, so that tiles share "
                "some",
                "draw for each tile (not for a whole batch, as layer-drop does), or put that module in eval()",
            )
        return dims[0]

    def _refusal(self, operator: str, what: str, instead: str) -> RequestError:
        return RequestError(
            f"the {self._what} {what} ({operator}): its random numbers cannot be the same for any division of the "
            f"tiles; {instead}"
        )


def _all_positions(shape: DrawnShape, device: torch.device) -> torch.Tensor:
    """Return the row-major position of each element of a tensor, from 0."""
    return draws.positions(shape, None, (0, 0, 0, 0), device, 0)  # None, zeros: not a part of a larger value


class NoDrawsInBackward(TorchDispatchMode):
    """Refuses random numbers in backward: a module that computes again there would draw others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and refuse one that draws.

        Raises:
            RequestError: it draws random numbers.
        """
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in function.tags:
            drawn = may_draw(function, arguments_of(function, args, kwargs))
            # The backward of attention may have the tag: it repeats the numbers of its forward, from their seed.
            if drawn and "backward" not in function._schema.name:
                raise RequestError(
                    f"the encoder draws random numbers in its backward ({function._schema.name}), as activation "
                    f"checkpointing does; turn that off: plan.memory_bytes bounds the memory of an encoder"
                )
        return function(*args, **kwargs)


def _like(arguments: dict[str, Any]) -> torch.Tensor:
    """Return an empty tensor as a factory would return it."""
    if "self" in arguments:
        return torch.empty_like(arguments["self"], dtype=arguments["dtype"])
    integers = "high" in arguments
    dtype = arguments["dtype"] or (torch.int64 if integers else torch.get_default_dtype())
    return torch.empty(arguments["size"], dtype=dtype, device=arguments["device"] or "cpu")
