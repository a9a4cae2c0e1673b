"""Programs for other micro-batch sizes, derived from those for one and two images.

A capture takes seconds, and planning asks for a dozen sizes.

    captured, 1 image                 view(x, [1, 2048])      x: 1 x 2048 x 1 x 1
    derived or captured, 2 images     view(x, [2, 2048])      x: 2 x 2048 x 1 x 1
    derived, 8 images                 view(x, [8, 2048])      x: 8 x 2048 x 1 x 1

Every size and every whole number in an argument is assumed to lie on a straight line through those of the two. A model
that reads its batch size may do otherwise, so derived programs only compare plans; that of a chosen plan is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hyfi_core.capture.program import Operator, Program, ValueInfo
from hyfi_core.cost.search.doubled import doubled


class ResizedPrograms:
    """Programs for any micro-batch size, derived from the capture for one image where possible, else captured.

    Args:
        captured: captures the model for a number of images.
    """

    def __init__(self, captured: Callable[[int], Program]) -> None:
        self._captured = captured
        self._derived: dict[int, Program] = {}
        self._can_derive = True
        self._two: Program | None = None

    def __call__(self, images: int) -> Program:
        """Return the program for micro-batches of ``images`` images, if possible extrapolated from one and two images.

        Raises:
            RequestError: as ``capture``.
        """
        if images == 1 or not self._can_derive:
            return self._captured(images)
        if images == 2:
            return self._for_two()
        if images not in self._derived:
            try:
                self._derived[images] = resized(self._captured(1), self._for_two(), images)
            except _DiffersError:  # these two differ in more than sizes, so no program can be derived from them
                self._can_derive = False
                return self._captured(images)
        return self._derived[images]

    def _for_two(self) -> Program:
        if self._two is None:
            self._two = doubled(self._captured(1)) or self._captured(2)
        return self._two

    def as_captured(self, images: int) -> bool:
        """Whether the program for ``images`` images equals its capture; the model is captured to compare."""
        return self(images) is self._captured(images) or self(images).digest() == self._captured(images).digest()


class _DiffersError(Exception):
    """Two programs differ in more than sizes."""


def resized(single: Program, two: Program, images: int) -> Program:
    """Return the program for ``images`` images, extrapolated from two; its constants are those of ``single``.

    Args:
        single: the program for one image.
        two: the program for two images.
        images: number of images of the program to return.

    Raises:
        _DiffersError: ``single`` and ``two`` differ in more than sizes.
    """
    same = ("parameters", "buffers", "image", "outputs", "mutations")
    constants, of_two = (
        [(name, item.shape, item.dtype) for name, item in program.constants.items()] for program in (single, two)
    )
    if any(getattr(single, name) != getattr(two, name) for name in same) or constants != of_two:
        raise _DiffersError
    if len(single.operators) != len(two.operators) or single.values.keys() != two.values.keys():
        raise _DiffersError
    pairs = zip(single.operators, two.operators, strict=True)
    values = {name: _value(info, two.values[name], images) for name, info in single.values.items()}
    return replace(single, operators=tuple(_operator(*pair, images) for pair in pairs), values=values)


def _operator(single: Operator, two: Operator, images: int) -> Operator:
    """Return an operator for ``images`` images, by its difference between one image and two.

    Raises:
        _DiffersError: it is another operator for two images.
    """
    if (single.name, single.target, single.outputs, single.module) != (two.name, two.target, two.outputs, two.module):
        raise _DiffersError
    if single == two:
        return single
    args, kwargs = _on_line((single.args, dict(single.kwargs)), (two.args, dict(two.kwargs)), images)
    return replace(single, args=args, kwargs=kwargs)


def _value(single: ValueInfo, two: ValueInfo, images: int) -> ValueInfo:
    if single == two:
        return single
    if single.dtype != two.dtype:
        raise _DiffersError
    return ValueInfo(_on_line(single.shape, two.shape, images), single.dtype)


def _on_line(single: Any, two: Any, images: int) -> Any:
    """Return an argument with every whole number extrapolated from one image and two to ``images`` images.

    Raises:
        _DiffersError: the two differ in something else.
    """
    if type(single) is not type(two):
        raise _DiffersError
    # Not isinstance: True is an int, too.
    if type(single) is int:
        return single + (two - single) * (images - 1)
    if isinstance(single, (list, tuple)) and len(single) == len(two):
        return type(single)(_on_line(a, b, images) for a, b in zip(single, two, strict=True))
    if isinstance(single, Mapping) and single.keys() == two.keys():
        return {name: _on_line(item, two[name], images) for name, item in single.items()}
    if single != two:
        raise _DiffersError
    return single
