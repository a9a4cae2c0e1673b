"""Exact parallel training, in five dimensions and over branches, of ordinary PyTorch classifiers on whole images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyfi_core.errors import RequestError as RequestError
    from hyfi_core.plan.box import Box as Box
    from hyfi_core.plan.parallel_plan import ParallelPlan as ParallelPlan
    from hyfi_core.runtime.engine import Engine as Engine
    from hyfi_core.runtime.launch import init as init
    from hyfi_core.runtime.parallelize import parallelize as parallelize
    from hyfi_core.tiles.engine import TilesEngine as TilesEngine
    from hyfi_core.tiles.parallelize_tiles import parallelize_tiles as parallelize_tiles
    from hyfi_core.tiles.source import TensorTiles as TensorTiles
    from hyfi_core.tiles.source import TileSource as TileSource

_WHERE = {
    "Box": "hyfi_core.plan.box",
    "ParallelPlan": "hyfi_core.plan.parallel_plan",
    "Engine": "hyfi_core.runtime.engine",
    "parallelize": "hyfi_core.runtime.parallelize",
    "parallelize_tiles": "hyfi_core.tiles.parallelize_tiles",
    "TensorTiles": "hyfi_core.tiles.source",
    "TileSource": "hyfi_core.tiles.source",
    "TilesEngine": "hyfi_core.tiles.engine",
    "RequestError": "hyfi_core.errors",
    "init": "hyfi_core.runtime.launch",
}
__all__ = [
    "Box",
    "Engine",
    "ParallelPlan",
    "RequestError",
    "TensorTiles",
    "TileSource",
    "TilesEngine",
    "init",
    "parallelize",
    "parallelize_tiles",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first access, so that importing a plan does not import torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'hyfi_core' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)
