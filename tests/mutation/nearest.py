"""The nearest tests of a module: those with its name, then those of its folder."""

from __future__ import annotations

from pathlib import Path

PACKAGES = (
    "hyfi_core/plan",
    "hyfi_core/rules",
    "hyfi_core/ops",
    "hyfi_core/schedule",
    "data/samples",
    "pathology/tissue",
)
"""Those whose modules are mutated."""


def nearest(root: Path, path: str) -> list[list[str]]:
    """Return groups of tests, the nearest first.

    Args:
        root: of the project.
        path: of the module, from the root.
    """
    module, groups = Path(path), list[list[str]]()
    folder = Path("tests") / module.parent
    named = folder / f"test_{module.stem}.py"
    if (root / named).exists():
        groups.append([str(named)])
    while not (root / folder).is_dir():
        folder = folder.parent
    groups.append([str(folder)])
    package = next(package for package in PACKAGES if path.startswith(f"{package}/"))
    if folder != Path("tests") / package:
        groups.append([str(Path("tests") / package)])
    return groups
