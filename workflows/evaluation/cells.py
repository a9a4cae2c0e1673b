"""``--cells R,C`` of the commands that evaluate."""

from __future__ import annotations

from hyfi_core.errors import RequestError


def parse_cells(text: str | None) -> tuple[int, int] | None:
    """Return (rows, columns), None where the option was left out.

    Raises:
        RequestError: it is not two whole numbers ≥ 1.
    """
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2 or not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise RequestError(f"--cells {text}: use rows and columns, two whole numbers ≥ 1, as in --cells 4,4")
    return int(words[0]), int(words[1])
