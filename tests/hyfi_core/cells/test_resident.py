"""Pages make room for the rest of the process; freed memory is returned where room is short, and not at every step."""

from __future__ import annotations

import pytest
import torch

from hyfi_core import process_memory
from hyfi_core.cells import budget
from hyfi_core.cells.budget import ResidentLimit

MB = 1 << 20


def test_pages_make_room_for_what_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    held, kept = {"others": 100 * MB, "freed": 0}, []

    def release() -> None:
        kept.append(held["freed"])
        held["freed"] = 0

    monkeypatch.setattr(budget, "return_freed_now", release)
    limit, paged = ResidentLimit(most_bytes=400 * MB, least_bytes=50 * MB), 200 * MB
    monkeypatch.setattr(budget, "resident_bytes", lambda: paged + held["others"] + held["freed"])
    assert limit.pages(250 * MB, paged) == 250 * MB and not kept  # 300 MB would fit
    held["freed"] = 100 * MB
    assert limit.pages(250 * MB, paged) == 250 * MB and kept == [100 * MB]
    held["others"] = 160 * MB
    assert limit.pages(250 * MB, paged) == 240 * MB and len(kept) == 2
    held["others"] = 170 * MB
    assert limit.pages(250 * MB, paged) == 230 * MB and len(kept) == 2  # too little has been added to look again
    held["others"] = 390 * MB
    assert limit.pages(250 * MB, paged) == 50 * MB
    assert limit.pages(20 * MB, paged) == 20 * MB


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_the_buffers_of_matrix_products_are_found() -> None:
    assert process_memory._mkl_free_buffers() is not None
    process_memory.return_freed_now()
    assert torch.equal(torch.ones(64, 64) @ torch.ones(64, 64), torch.full((64, 64), 64.0))
