"""Tensors that lie in the same memory without being the same tensor, as after ``p.data = q.data``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch


def overlapping(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Yield pairs of names of different tensors that have memory in common; those without values have none.

    Tied weights, which are one tensor under several names, are no pair.
    """
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)
    by_storage: dict[tuple[torch.device, int], list[tuple[range, str]]] = {}
    for name in names.values():
        tensor = tensors[name]
        has_values = tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta
        # Address 0: freed, or a subclass that has its values elsewhere.
        if has_values and (address := tensor.untyped_storage().data_ptr()):
            by_storage.setdefault((tensor.device, address), []).append((_span(tensor), name))
    for placed in by_storage.values():
        placed.sort(key=lambda entry: entry[0].start)
        for at, (span, name) in enumerate(placed):
            for other_span, other in placed[at + 1 :]:
                if other_span.start >= span.stop:
                    break  # as all that follow
                if _have_common_elements(tensors[name], tensors[other]):
                    yield name, other


def _span(tensor: torch.Tensor) -> range:
    """Return the bytes of its storage from the first to the last that a tensor has."""
    last = sum((side - 1) * stride for side, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size()
    return range(tensor.storage_offset() * size, (tensor.storage_offset() + last + 1) * size)


def _have_common_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors whose spans overlap overlap: the rows of a matrix may belong to them in turns."""
    if a.dtype != b.dtype:
        return True
    covered = torch.zeros(a.untyped_storage().nbytes() // a.element_size(), dtype=torch.bool)
    covered.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(covered.as_strided(b.shape, b.stride(), b.storage_offset()).any())
