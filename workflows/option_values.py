"""Parsing of option values that several commands have."""

from __future__ import annotations

import math
from typing import Literal

from hyfi_core.errors import RequestError


def parse_part(text: str) -> tuple[int, int]:
    """Return (i, n) of ``--part i/n``, by which several nodes divide the work of a command.

    Raises:
        RequestError: ``text`` is not two whole numbers with 1 ≤ i ≤ n.
    """
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise RequestError(f"--part {text}: expected i/n, as in 1/4, 2/4, 3/4, 4/4")
    return int(number), int(of)


Cells = tuple[int, int] | Literal["auto"] | None


def parse_cells(text: str | None, memory: str | None = None, spill: str | None = None) -> Cells:
    """Return (rows, columns) of ``--cells R,C``, or auto, also with ``--memory`` alone; None if both were left out.

    Args:
        text: Value of ``--cells``.
        memory: Value of ``--memory``.
        spill: Value of ``--spill``.

    Raises:
        RequestError: ``text`` is neither auto nor two whole numbers ≥ 1, or ``--spill`` is missing or has no effect.
    """
    if text is None and memory is None:
        if spill is not None:
            raise RequestError(f"--spill {spill} needs --cells R,C or --memory: without cells everything is in memory")
        return None
    if spill is None and (memory is not None or text == "auto"):
        option = f"--memory {memory}" if memory is not None else "--cells auto"
        raise RequestError(f"{option} needs --spill FOLDER, on a fast local disk, for maps that do not fit")
    if text is None or text == "auto":
        return "auto"
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2 or not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise RequestError(f"--cells {text}: use rows and columns, two whole numbers ≥ 1, as in --cells 4,4, or auto")
    return int(words[0]), int(words[1])


def parse_size(text: str | None) -> tuple[int, int] | None:
    """Return (height, width) of ``--size-px H,W``, where one number stands for both; None if it was left out.

    Raises:
        RequestError: ``text`` is not one or two whole numbers ≥ 1.
    """
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if len(words) > 2 or not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise RequestError(f"--size-px {text}: use height and width in pixels, as in 2048,1024, or one number for both")
    return int(words[0]), int(words[-1])


def parse_fractions(text: str | None) -> list[float] | None:
    """Return the numbers of ``--fractions 0.7,0.1,0.2``, in this order; None if it was left out.

    Raises:
        RequestError: ``text`` has something else than finite numbers.
    """
    if text is None:
        return None
    try:
        fractions = [float(word) for word in text.split(",")]
    except ValueError:
        fractions = [math.nan]
    if not all(map(math.isfinite, fractions)):  # `float` reads nan and inf, too
        raise RequestError(f"--fractions {text}: use the shares of train, val and test, as in 0.7,0.1,0.2")
    return fractions
