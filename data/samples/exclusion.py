"""Slides that a run leaves out because of their flags in the store, such as blur."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from data.csv_table import write_table
from hyfi_core.errors import RequestError

SLIDE_FLAGS = (
    "bad_tiles",
    "black",
    "blur",
    "chunks_absent",
    "colour",
    "levels_left_out",
    "mpp_assumed",
    "mpp_doubtful",
    "mpp_replaced",
    "pen",
    "several_scenes",
    "tissue_given",
    "truncated",
    "upsampled",
)
"""The flags that ingest gives to slides, in the column ``flags`` of ``manifest.csv``."""
EXCLUDED_COLUMNS = ("slide_id", "case_id", "split", "flags")
"""Columns of ``RUN/excluded.csv``."""


@dataclass(frozen=True)
class ExcludedSlide:
    """A slide that is left out.

    Attributes:
        slide_id, case_id: The slide.
        split: The split that it would be in.
        flags: The flags for which it is left out.
    """

    slide_id: str
    case_id: str
    split: str
    flags: tuple[str, ...]

    def row(self) -> dict[str, str]:
        """Return the row of ``excluded.csv``; flags are joined by ``;``."""
        values = (self.slide_id, self.case_id, self.split, ";".join(self.flags))
        return dict(zip(EXCLUDED_COLUMNS, values, strict=True))


def flags_to_exclude(row: Mapping[str, str], flags: Collection[str]) -> tuple[str, ...]:
    """Return the flags of a manifest row that are in ``flags``: ``("blur", "pen")``."""
    return tuple(flag for flag in row.get("flags", "").split(";") if flag in flags)


def without_flags(rows: Iterable[Mapping[str, str]], flags: Collection[str]) -> list[Mapping[str, str]]:
    """Return the manifest rows of slides that have none of ``flags``."""
    return [row for row in rows if not flags_to_exclude(row, flags)]


def describe_excluded(excluded: Sequence[ExcludedSlide]) -> str:
    """Return a sentence with the number and names of the slides."""
    names = ", ".join(f"{slide.slide_id} ({', '.join(slide.flags)})" for slide in excluded)
    return f"data.exclude_flags: {len(excluded)} slide{'s' * (len(excluded) != 1)} left out: {names}"


def write_excluded(path: Path, excluded: Iterable[ExcludedSlide]) -> None:
    """Write ``RUN/excluded.csv`` atomically."""
    write_table(path, EXCLUDED_COLUMNS, [slide.row() for slide in excluded])


def refuse_empty(split: str, lost: Sequence[str], excluded: Sequence[ExcludedSlide]) -> NoReturn:
    """Refuse an exclusion that leaves a split without slides, or without slides of the classes ``lost``.

    Raises:
        RequestError: Always.
    """
    of_classes = f"of {', '.join(map(repr, lost))} " if lost else ""
    mine = [slide for slide in excluded if slide.split == split]
    raise RequestError(
        f"{describe_excluded(mine)}; no slide {of_classes}is left in {split!r}; exclude fewer flags, or add slides"
    )
