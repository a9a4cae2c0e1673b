"""Constants are copied once to each device and dtype; their memory is known as long as they are there."""

from __future__ import annotations

import gc

import torch

from hyfi_core.ops.constants import _STORAGES, Constant, is_constant


def test_a_constant_is_copied_once_and_forgotten_with_its_owner() -> None:
    gc.collect()
    before = set(_STORAGES)
    constant = Constant([0.25, 0.5])
    wide = constant.on(torch.device("cpu"), torch.float64)
    assert wide.tolist() == [0.25, 0.5] and constant.like(wide) is wide
    narrow = constant.like(torch.zeros(1, dtype=torch.float32))
    assert narrow.dtype == torch.float32 and is_constant(narrow.untyped_storage())
    assert not is_constant(torch.zeros(2).untyped_storage())
    assert len(_STORAGES - before) == 2
    del constant
    gc.collect()
    assert not is_constant(narrow.untyped_storage()), "its memory may be freed"
