"""``--part i/n``, with which several nodes divide the work of a command."""

from __future__ import annotations

from hyfi_core.errors import RequestError


def parse_part(text: str) -> tuple[int, int]:
    """Return (i, n).

    Raises:
        RequestError: ``text`` is not two whole numbers with 1 ≤ i ≤ n.
    """
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise RequestError(f"--part {text}: expected i/n, as in 1/4, 2/4, 3/4, 4/4")
    return int(number), int(of)
