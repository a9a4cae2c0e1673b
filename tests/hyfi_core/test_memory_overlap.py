"""Which tensors lie in the same memory."""

from __future__ import annotations

import torch
from torch import nn

from hyfi_core.memory_overlap import overlapping


def test_pairs_are_different_tensors_with_common_elements() -> None:
    whole = torch.zeros(4, 6)
    freed = [torch.zeros(2), torch.zeros(2)]
    for tensor in freed:
        tensor.untyped_storage().resize_(0)
    tensors = {
        "whole": whole,
        "whole again": whole,
        "last row": whole[3],
        "even columns": whole[:, ::2],
        "odd columns": whole[:, 1::2],
        "bits of a row": whole[0].view(torch.int32),
        "copy": whole.clone(),
        "empty": whole[:0],
        "meta": whole.to("meta"),
        "meta, too": whole.to("meta"),
        "freed": freed[0],
        "freed, too": freed[1],
    }
    pairs = {frozenset(pair) for pair in overlapping(tensors)}
    columns = ("even columns", "odd columns")
    assert pairs == {
        *(frozenset(("whole", name)) for name in ("last row", *columns, "bits of a row")),
        *(frozenset((name, other)) for name in columns for other in ("last row", "bits of a row")),
    }


def test_tied_and_plain_weights_are_no_pairs() -> None:
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    layers[1].weight = layers[0].weight
    assert not [*overlapping(dict(layers.named_parameters(remove_duplicate=False)))]
    layers[1].bias.data = layers[0].bias.data
    assert [*overlapping(dict(layers.named_parameters()))] == [("0.bias", "1.bias")]
