"""Known jobs: a mark in Inductor's cache folder for each job whose code is there and can be loaded at once."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hyfi_core.lowering.compiling import graph_job
from hyfi_core.lowering.compiling.graph_job import GraphJob


def cached_on_disk() -> bool:
    """Whether what one process compiles is loaded by another."""
    import torch._inductor.config as config

    return graph_job.BACKEND == "inductor" and config.fx_graph_cache and not config.force_disable_caches


def compiled_before(job: GraphJob) -> bool:
    """Whether a run has compiled a job before; its code may have been removed from the cache since."""
    return cached_on_disk() and _mark(job).is_file()


def mark(job: GraphJob) -> None:
    """Mark that a job's code is in the cache, if the mark can be written."""
    if cached_on_disk():
        with contextlib.suppress(OSError):
            # A mark is a hint: a full or read-only disk must not end a run.
            _mark(job).parent.mkdir(parents=True, exist_ok=True)
            _mark(job).touch()


def _mark(job: GraphJob) -> Path:
    from torch._inductor.runtime.runtime_utils import cache_dir  # type: ignore[attr-defined]

    return Path(cache_dir()) / "hyfi" / job.digest
