"""The fields of a parallel plan, each checked by itself; ``parse_…`` returns it in the form that the plan keeps.

All raise ``RequestError`` with the name of the field, what was given and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hyfi_core.errors import RequestError


def check_count(name: str, value: Any, allowed: str = "a whole number from 1") -> None:
    """Refuse a field that is not a whole number from 1."""
    if not _is_count(value):
        raise RequestError(f"plan.{name} is {value!r}; use {allowed}")


def check_flag(name: str, value: Any) -> None:
    """Refuse a field that is neither true nor false; text such as "no" would count as true."""
    if not isinstance(value, bool):
        raise RequestError(f"plan.{name} is {value!r}; use true or false")


def parse_grids(grids: Any) -> tuple[tuple[int, int], ...]:
    """Return (rows, columns) of ranks for each stage."""
    example = "use rows x columns for each stage, e.g. ((1, 2),)"
    try:
        parsed = tuple((rows, columns) for rows, columns in grids)
    except (TypeError, ValueError):
        raise RequestError(f"plan.grids is {grids!r}; {example}") from None
    if not parsed:
        raise RequestError(f"plan.grids is empty; {example}, or set plan.tiles for parallelize_tiles")
    for grid in parsed:
        if not all(map(_is_count, grid)):
            raise RequestError(f"plan.grids has {grid!r}; both sides are whole numbers from 1: {example}")
    return parsed


def parse_cells(cells: Any) -> tuple[int, int]:
    """Return (rows, columns) of cells; "auto" and None need no parsing, and are not passed here."""
    example = 'use null, "auto", or rows and columns, e.g. (4, 4)'
    try:
        rows, columns = cells
    except (TypeError, ValueError):
        raise RequestError(f"plan.cells is {cells!r}; {example}") from None
    if not _is_count(rows) or not _is_count(columns):
        raise RequestError(f"plan.cells is {cells!r}; both are whole numbers from 1: {example}")
    return rows, columns


def check_spill(spill: Any, cells: Any) -> None:
    """Refuse ``spill`` that is neither text nor None, ``spill`` without cells, and cells "auto" without ``spill``."""
    if spill is None and cells == "auto":
        raise RequestError('plan.cells is "auto", which needs plan.spill, such as "memory"; set it, or name the cells')
    if spill is None:
        return
    if not isinstance(spill, str) or not spill:
        raise RequestError(f'plan.spill is {spill!r}; use null, "memory", or a folder')
    if cells is None:
        raise RequestError(f"plan.spill is {spill!r}, which needs plan.cells; set it, e.g. (4, 4)")


def parse_cuts(cuts: Any, stages: int) -> tuple[str, ...]:
    """Return the names of the modules after which to cut; "auto" needs no parsing, and is not passed here."""
    parsed = tuple(cuts) if isinstance(cuts, Iterable) else (None,)  # once: it may be a generator
    if isinstance(cuts, str) or not all(isinstance(cut, str) for cut in parsed):
        raise RequestError(f'plan.cuts is {cuts!r}; use "auto" or a list of module names, one for each cut')
    if len(parsed) != stages - 1:
        raise RequestError(
            f"plan.cuts names {len(parsed)} module(s), but {stages} stage(s) need {stages - 1}; name "
            f"the module after which each stage but the last ends"
        )
    return parsed


def parse_recompute(recompute: Any, stages: int) -> bool | tuple[int, ...]:
    """Return True or False for all stages, or the numbers of the stages that recompute, ascending."""
    if isinstance(recompute, bool):
        return recompute
    is_list = isinstance(recompute, Iterable) and not isinstance(recompute, str)
    parsed = tuple(recompute) if is_list else ()  # once: it may be a generator
    if not is_list or not all(type(stage) is int and 0 <= stage < stages for stage in parsed):
        raise RequestError(f"plan.recompute is {recompute!r}; use true, false, or stages from 0 to {stages - 1}")
    return tuple(sorted(set(parsed)))


def parse_shares(shares: Any, replicas: int, microbatches: int) -> tuple[int, ...]:
    """Return the samples of a step for each replica, at least one for each micro-batch."""
    example = f"null, or a multiple of plan.microbatches = {microbatches} for each of {replicas} replica(s)"
    try:
        parsed = tuple(shares)
    except TypeError:
        raise RequestError(f"plan.shares is {shares!r}; use {example}") from None
    if len(parsed) != replicas:
        raise RequestError(f"plan.shares is {shares!r}, {len(parsed)} share(s); use {example}")
    for share in parsed:
        if not _is_count(share) or share % microbatches:
            raise RequestError(
                f"plan.shares has {share!r}; every replica needs at least one sample of each micro-batch: use {example}"
            )
    return parsed


def _is_count(value: Any) -> bool:
    """Whether a value is a whole number from 1; not ``True``, which is an int, too."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
