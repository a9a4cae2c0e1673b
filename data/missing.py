"""Words that stand for a missing value in tables."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from data.spelling import canonical

MISSING = (
    "NA",
    "N/A",
    "N.A.",
    "#N/A",
    "#N/A N/A",
    "#NA",
    "nan",
    "-nan",
    "1.#IND",
    "1.#QNAN",
    "NaT",
    "None",
    "null",
    "nil",
    "-",
    "--",
    ".",
    "?",
    "unknown",
    "missing",
    "not available",
    "not applicable",
    "not reported",
    "#NULL!",
    "#VALUE!",
    "#REF!",
    "#DIV/0!",
    "#NAME?",
    "#NUM!",
)
"""Words that spreadsheets, pandas, R, SQL and cancer registries write for a missing value; see `is_missing`."""
_AROUND = "[]()<>'\" "


def is_missing(text: str, words: Iterable[str] = MISSING) -> bool:
    """Whether a value is empty or one of ``words``, without regard to case, white space, quotes and brackets."""
    return not text or _form(text) in _forms(tuple(words))


@lru_cache
def _forms(words: tuple[str, ...]) -> frozenset[str]:
    return frozenset(_form(word) for word in words) | {""}


def _form(text: str) -> str:
    return canonical(text).strip(_AROUND)
