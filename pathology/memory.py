"""Number of ingest workers that fit into memory."""

from __future__ import annotations

import re

from data.cores import usable_cores
from hyfi_core.errors import RequestError
from hyfi_core.process_memory import available_bytes

WORKER_BYTES = 1_000_000_000
"""Peak memory of one worker, for any slide; see `workflows.benchmarks.ingest_memory`."""
_USABLE_FRACTION = 0.8
"""Fraction of the free memory that workers may use by default."""


def parse_bytes(text: str) -> int:
    """Parse an amount of memory: ``8GB``, ``8 GiB``, ``800M`` or a number of bytes.

    Raises:
        RequestError: The text is none of these.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not match:
        raise RequestError(f"--memory {text}: expected an amount such as 8GB or 1500M")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " kmgt".index(match[2] or " "))


def worker_count(requested: int, memory_bytes: int | None, sharing: int = 1) -> int:
    """Return the number of workers: the requested number, or as many as fit into memory, but at least 1.

    Args:
        requested: Number requested; 0 for as many as cores.
        memory_bytes: Memory of all workers together; None for 80 % of the free memory.
        sharing: Number of processes, such as ranks, that divide this process's cores and the machine's memory.

    Raises:
        RequestError: The memory is too small for one worker.
    """
    workers = requested or usable_cores() // sharing
    if memory_bytes is not None and memory_bytes < WORKER_BYTES:
        raise RequestError(
            f"--memory {memory_bytes / 1e9:.2g} GB: one worker needs up to {WORKER_BYTES / 1e9:g} GB; give more"
        )
    # A given amount is for this process's workers alone; free memory is shared by all ``sharing`` processes.
    budget = memory_bytes if memory_bytes is not None else int(_USABLE_FRACTION * available_bytes()) // sharing
    return max(1, min(workers, budget // WORKER_BYTES))
