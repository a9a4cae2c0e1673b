"""The settings of a sweep: every combination of a YAML's lists, random ones, or the space of a search."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from data.samples.keyed import keyed_uniforms
from hyfi_core.errors import RequestError

_OF_SLIDES = ("data.store", "data.splits", "data.split_column", "data.exclude_flags", "validation.split")
_OF_LABELS = (
    *("data.labels", "data.id_column", "data.missing", "data.merge_alike"),
    *("data.target", "data.task", "data.targets", "model.classes"),
)
_REFUSED = {
    "run.dir": "each setting has a folder of its own",
    **dict.fromkeys(_OF_SLIDES, "settings are compared on the same slides"),
    **dict.fromkeys(_OF_LABELS, "settings are compared on the same labels"),
    "validation.metric": "settings are compared by one metric",
}
"""Keys that may not differ between settings, and why."""
_MOST = 1000
_RANGE = {"low", "high", "log"}


@dataclass(frozen=True)
class SweptSetting:
    """One setting.

    Attributes:
        number: Its number, from 0.
        values: ``section.key`` -> value.
        fold: The fold for which a search has proposed it; None: it is for all folds, or there are no folds.
    """

    number: int
    values: Mapping[str, Any]
    fold: int | None = None

    @property
    def folder_name(self) -> str:
        """The folder of its run, in the folder of the sweep."""
        name = f"setting-{self.number:03d}"
        return name if self.fold is None else f"for-fold-{self.fold}/{name}"

    @property
    def overrides(self) -> list[str]:
        """The values as arguments of ``hyfi train``."""
        return [f"{key}={_yaml_of(value)}" for key, value in self.values.items()]

    def describe(self) -> str:
        """Return the values as text."""
        return ", ".join(f"{key}={text_of(value)}" for key, value in self.values.items())


def read_settings(path: Path, trials: int | None, seed: int) -> list[SweptSetting]:
    """Return the settings of a YAML such as ``{optimizer.lr: [1e-3, 1e-4], data.batch_size: [4, 8]}``.

    Args:
        path: The file: keys with lists of values or, for random ones, ``{low: 1e-5, high: 1e-2, log: true}``.
        trials: How many random settings, each different; None: every combination.
        seed: Seed of random settings.

    Raises:
        RequestError: The file cannot be read, or a value is not allowed; the message names the key.
    """
    grid = read_space(path, ranges=trials is not None)
    if trials is None:
        count = math.prod(len(values) for values in grid.values())
        if count > _MOST:
            raise RequestError(f"{path}: {count} combinations; up to {_MOST} are run; use --trials N for random ones")
        combinations = itertools.product(*grid.values())
        return [
            SweptSetting(number, dict(zip(grid, combination, strict=True)))
            for number, combination in enumerate(combinations)
        ]
    drawn: list[dict[str, Any]] = []
    # Limited, because a small space may have fewer different settings than asked for.
    for draw in range(trials * 20):
        # By the number of the draw, so that more trials keep the first ones.
        uniforms = keyed_uniforms(len(grid), "sweep", seed, draw)
        values = {key: _drawn(choices, float(u)) for (key, choices), u in zip(grid.items(), uniforms, strict=True)}
        if values not in drawn:
            drawn.append(values)
        if len(drawn) == trials:
            break
    return [SweptSetting(number, values) for number, values in enumerate(drawn)]


def read_space(path: Path, ranges: bool) -> dict[str, Any]:
    """Return each key of a YAML of settings with its list of values, or with its range (low, high, log).

    Args:
        path: The file.
        ranges: Whether ranges are allowed.

    Raises:
        RequestError: It cannot be read, or has something else; the message names the key.
    """
    space = {key: _with_numbers(values) for key, values in _read(path).items()}
    for key, values in space.items():
        _check(path, key, values, ranges)
    return space


def corners(space: Mapping[str, Any]) -> list[SweptSetting]:
    """Return settings that together have each value of each list and both ends of each range.

    The first has the first value of every key; each other setting differs from it in one key.
    """
    ends = {
        key: values if isinstance(values, list) else [range_value(values, uniform) for uniform in (0, 1)]
        for key, values in space.items()
    }
    first = {key: values[0] for key, values in ends.items()}
    varied = [first, *(first | {key: value} for key, values in ends.items() for value in values[1:])]
    return [SweptSetting(number, values) for number, values in enumerate(varied)]


def range_value(values: Mapping[str, Any], uniform: float) -> float:
    """Return the number at a fraction (0 to 1) of a range, with four digits."""
    low, high = range_ends(values)
    # Logarithmic: equal ratios are equally likely.
    return rounded(low * (high / low) ** uniform if values.get("log") else low + uniform * (high - low))


def range_ends(values: Mapping[str, Any]) -> tuple[float, float]:
    """Return the lowest and the highest number of a range."""
    low, high = _number(values["low"]), _number(values["high"])
    assert low is not None and high is not None
    return low, high


def rounded(value: float) -> float:
    """Return a drawn number with four digits."""
    return float(f"{value:.4g}")


def _read(path: Path) -> dict[str, Any]:
    """Return the values of each key, as ``section.key``, from a YAML file."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise RequestError(f"{path}: not YAML: {error}") from None
    if not isinstance(tree, dict) or not tree:
        raise RequestError(f"{path}: has no settings; write keys with lists, as in optimizer.lr: [1e-3, 1e-4]")
    return {str(key): value for key, value in _flat(tree)}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return (section.key, value); a section may be a mapping of its keys."""
    pairs = []
    for key, value in tree.items():
        # Only one level: below a full key, a mapping is a range.
        is_section = isinstance(value, Mapping) and not (prefix or "." in str(key))
        pairs += _flat(value, f"{key}.") if is_section else [(f"{prefix}{key}", value)]
    return pairs


def _check(path: Path, key: str, values: Any, ranges: bool) -> None:
    """Refuse values of a key that are neither a list nor, if ``ranges`` are allowed, a range."""
    if key in _REFUSED:
        raise RequestError(f"{path}: {key} may not differ between settings: {_REFUSED[key]}")
    if isinstance(values, Mapping):
        low, high = (_number(values.get(name)) for name in ("low", "high"))
        is_range = set(values) <= _RANGE and low is not None and high is not None and low < high
        if not is_range or (values.get("log") and low is not None and low <= 0):
            raise RequestError(f"{path}: {key}: given {values}; allowed: {{low: 1e-5, high: 1e-2, log: true}}")
        if not ranges:
            raise RequestError(f"{path}: {key} is a range, which is for random settings: give --trials N, or a list")
    elif not isinstance(values, list) or not values:
        raise RequestError(f"{path}: {key}: given {values!r}; allowed: a list of values, or {{low: …, high: …}}")


def _drawn(values: Any, uniform: float) -> Any:
    """Return the value of a list or range that a random number in [0, 1) chooses."""
    if isinstance(values, list):
        # uniform < 1, so the index is in range.
        return values[int(uniform * len(values))]
    return range_value(values, uniform)


def text_of(value: Any) -> str:
    """Return a value as text."""
    return value if isinstance(value, str) else json.dumps(value)


def _yaml_of(value: Any) -> str:
    """Return a value as one line of YAML: as JSON, unless YAML would read that as another value."""
    text = json.dumps(value)
    if yaml.safe_load(text) == value:
        return text
    # 1e-08 is text in YAML, 1.0e-08 a number.
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()


def _with_numbers(values: Any) -> Any:
    """Return values with numbers for texts such as 1e-3, which YAML reads as text."""
    if not isinstance(values, list):
        return values
    return [value if not isinstance(value, str) or (number := _number(value)) is None else number for value in values]


def _number(value: Any) -> float | None:
    """Return a number; YAML reads 1e-3 without a point as text."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def same_keys(settings: Sequence[SweptSetting]) -> list[str]:
    """Return the keys that the settings vary, in order; all settings of a sweep have the same."""
    return list(settings[0].values)
