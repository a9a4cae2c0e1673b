"""What operators need to know of tensors."""

from __future__ import annotations

import torch

from hyfi_core.ops.base import is_expanded


def test_only_elements_that_share_memory_make_a_tensor_expanded() -> None:
    assert is_expanded(torch.zeros(1, 3).expand(2, 3))
    assert not is_expanded(torch.zeros(2, 3)) and not is_expanded(torch.zeros(0, 3))
    assert not is_expanded(torch.zeros(3).as_strided((1, 3), (0, 1))), "one row shares nothing, whatever its stride"
