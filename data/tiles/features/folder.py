"""Folders of features: one file for each slide."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from data.location import each
from data.tiles.features.stored import StoredFeatures
from hyfi_core.errors import RequestError

_PLACES = (("", "*.h5"), ("", "*.zarr"), ("h5_files", "*.h5"), ("pt_files", "*.pt"), ("", "*.pt"))
"""(subfolder, pattern); only the first that matches is read, because both folders of CLAM have the same vectors."""


def open_features(folder: str | os.PathLike[str]) -> dict[str, StoredFeatures]:
    """Return slide id -> its features, sorted, of all slides of a folder.

    Args:
        folder: A folder that ``hyfi features``, TRIDENT, CLAM or STAMP wrote.

    Raises:
        RequestError: The folder does not exist, has no features, or features of several encoders; or a file is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RequestError(f"{folder}: no such folder; give one that hyfi features, TRIDENT, CLAM or STAMP wrote")
    paths = _files(folder)
    if not paths:
        raise RequestError(f"{folder}: it has no features (*.h5, *.zarr, h5_files/*.h5, pt_files/*.pt)")
    stored = {features.slide_id: features for features in each(StoredFeatures.of, paths, folder)}
    _check_alike(folder, stored)
    return dict(sorted(stored.items()))


def feature_files(folder: Path) -> dict[str, Path]:
    """Return slide id -> feature file of a folder, without opening any; empty if there are none."""
    return {path.name.rpartition(".")[0]: path for path in _files(folder)}


def _files(folder: Path) -> list[Path]:
    """Return the feature files of the first place in the folder that has any, sorted."""
    for subfolder, pattern in _PLACES:
        # No hidden files: these are unfinished files of killed writers.
        paths = sorted(path for path in (folder / subfolder).glob(pattern) if not path.name.startswith("."))
        if paths:
            return paths
    return []


def _check_alike(folder: Path, stored: dict[str, StoredFeatures]) -> None:
    """Refuse features of several encoders; the message names the most frequent one, and a file that differs."""
    for attribute in ("features", "encoder"):
        counts = Counter(getattr(features, attribute) for features in stored.values())
        if len(counts) > 1:
            usual = counts.most_common(1)[0][0]
            unlike = next(features for features in stored.values() if getattr(features, attribute) != usual)
            name = "length of vectors" if attribute == "features" else "encoder"
            raise RequestError(
                f"{folder}: its features are not of one encoder: {name} {usual} in {counts[usual]} files, but "
                f"{getattr(unlike, attribute)} in {unlike.path.name}; use a folder for each encoder"
            )
