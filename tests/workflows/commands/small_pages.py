"""A model of a user's own that lets this process hold almost nothing of its maps."""

from __future__ import annotations

from typing import Any

from torch import nn

from hyfi_core.cells import pager, paging
from tests.workflows import faults


def tiny(classes: int, **options: Any) -> nn.Module:
    """Return the tests' tiny network, and let every map be a page, and a pager hold 100 KB of them."""
    pager.SMALLEST_BYTES = 1
    paging.page_limit = lambda *given: 100_000  # type: ignore[assignment]
    return faults.tiny(classes, **options)
