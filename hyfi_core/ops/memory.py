"""Memory that may be written over: fresh pages cost a CPU more than the arithmetic on them."""

from __future__ import annotations

import sys

import torch

from hyfi_core.ops.base import Cotangents


def ours_alone(cotangents: Cotangents, index: int) -> bool:
    """Whether nothing but this tuple holds a cotangent's memory, so that the result may be written there.

    Autograd hands one tensor to several takers where it can (both operands of a sum get the same one), so this is asked
    of the tensor itself: one reference from Python, one to the tensor, one to its storage. The caller must not have
    bound it to a name of its own yet.
    """
    if cotangents[index] is None or sys.getrefcount(cotangents[index]) > 2:
        return False
    tensor = cotangents[index]
    assert tensor is not None
    storage = tensor.untyped_storage()  # one more reference, while we look
    counted = torch._C._storage_Use_Count(storage._cdata)
    held_once = tensor._use_count() == 1 and counted == 2  # type: ignore[attr-defined]
    return held_once and tensor.numel() * tensor.element_size() == storage.nbytes()
