"""Parsing of option values that several commands have."""

from __future__ import annotations

from hyfi_core.errors import RequestError


def parse_part(text: str) -> tuple[int, int]:
    """Return (i, n) of ``--part i/n``, with which several nodes divide the work of a command.

    Raises:
        RequestError: ``text`` is not two whole numbers with 1 ≤ i ≤ n.
    """
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise RequestError(f"--part {text}: expected i/n, as in 1/4, 2/4, 3/4, 4/4")
    return int(number), int(of)


def parse_cells(text: str | None) -> tuple[int, int] | None:
    """Return (rows, columns) of ``--cells R,C``; None if the option was left out.

    Raises:
        RequestError: ``text`` is not two whole numbers ≥ 1.
    """
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2 or not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise RequestError(f"--cells {text}: use rows and columns, two whole numbers ≥ 1, as in --cells 4,4")
    return int(words[0]), int(words[1])
