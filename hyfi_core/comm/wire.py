"""How values are sent, for any backend: dtype and NaN in reductions, memory order, objects as bytes, slices of a GPU.

16-bit floats are added as float32 and rounded once. A maximum or minimum with a NaN is NaN, as in one process;
``MPI.MAX`` and others do not guarantee that, so floats are sent as integers of the same order, with NaN at the end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyfi_core.comm.base import ReduceOp

_WIDE = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.bool: torch.uint8,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
}
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of ``dtype`` are reduced."""
    return _WIDE.get(dtype, dtype)


def to_wire(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Return the tensor to reduce instead of ``tensor``: itself for a sum of a wide dtype, else a copy; contiguous."""
    wide = tensor.detach().to(wide_type(tensor.dtype)).contiguous()
    return _ordered(wide, op) if op != "sum" and wide.dtype in _INTEGERS else wide


def from_wire(wire: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> None:
    """Write the reduced result into ``tensor``."""
    # It was reduced in place.
    if wire is tensor or wire.data_ptr() == tensor.data_ptr():
        return
    wide = wide_type(tensor.dtype)
    with torch.no_grad():
        tensor.copy_(_floats(wire, wide) if op != "sum" and wide in _INTEGERS else wire)


def reduced(parts: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Return the parts of all ranks reduced in rank order, in their dtype."""
    # Always a copy: sums are added to it in place, and the first part belongs to its rank.
    total = parts[0].to(wide_type(parts[0].dtype), copy=True)
    for part in parts[1:]:
        wide = part if part.dtype is total.dtype else part.to(total.dtype)
        if op == "sum":
            total += wide
        else:
            total = torch.maximum(total, wide) if op == "max" else torch.minimum(total, wide)
    return total.to(parts[0].dtype)


def _ordered(floats: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Return integers in the order of the floats; NaN is the last one for a maximum, the first for a minimum."""
    bits = floats.view(_INTEGERS[floats.dtype])
    limits = torch.iinfo(bits.dtype)
    # Floats are stored as sign and magnitude: the magnitude of negative ones is inverted, so that integers order alike.
    ordered = torch.where(bits >= 0, bits, bits ^ limits.max)
    return ordered.masked_fill_(floats.isnan(), limits.max if op == "max" else limits.min)


def _floats(ordered: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the floats of ``_ordered``; the two integers for NaN are bit patterns of NaN."""
    return torch.where(ordered >= 0, ordered, ordered ^ torch.iinfo(ordered.dtype).max).view(dtype)


def encoded(value: Any) -> torch.Tensor:
    """Return a JSON-like value as bytes, uint8."""
    # ``bytearray``: torch warns if memory is read-only, as that of ``bytes``.
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def decoded(data: torch.Tensor) -> Any:
    """Return the value of ``encoded``."""
    return json.loads(data.numpy().tobytes().decode())


def laid_out(tensor: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """Return a contiguous tensor with the elements in the order of the message; a view where possible.

    Args:
        tensor: the tensor to send.
        channels_last: whether four-dimensional tensors are sent in this order.
    """
    return (tensor.permute(0, 2, 3, 1) if channels_last and tensor.dim() == 4 else tensor).contiguous()


def as_sent(flat: torch.Tensor, shape: Sequence[int], channels_last: bool) -> torch.Tensor:
    """Return the elements of a message as a tensor of the given shape; a view.

    Args:
        flat: the elements as a tensor with one dim.
        shape: shape of the tensor to return.
        channels_last: the sender's ``channels_last``.
    """
    if channels_last and len(shape) == 4:
        count, channels, height, width = shape
        return flat.view(count, height, width, channels).permute(0, 3, 1, 2)
    return flat.view(tuple(shape))


def check_dense(tensor: torch.Tensor) -> None:
    """Refuse a tensor whose memory cannot be sent as it is.

    Raises:
        ValueError: it is neither contiguous nor channels-last.
    """
    if not (tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)):
        raise ValueError(
            f"a message must be contiguous or channels-last; got shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        )


@dataclass
class HostSlice:
    """A slice of a message in a device's memory, and its buffer on the host.

    Attributes:
        on_device: flat view of the message.
        buffer: its memory on the host; pinned for a GPU, so that copies do not block.
        copied: event that is recorded after the copy to the host.
    """

    on_device: torch.Tensor
    buffer: torch.Tensor
    copied: Any = None

    @property
    def pinned(self) -> bool:
        """Whether copies do not block."""
        return self.on_device.device.type == "cuda"

    def copy_to_host(self) -> None:
        """Start the copy of the slice to the host, on the stream that computes it."""
        self.buffer.copy_(self.on_device, non_blocking=True)
        if self.pinned:
            self.copied = torch.cuda.Event()
            self.copied.record()

    def is_copied(self) -> bool:
        """Whether the slice is on the host."""
        return self.copied is None or bool(self.copied.query())

    def copy_to_device(self) -> None:
        """Start the copy of the slice to the device; PyTorch reuses the pinned memory only after the copy."""
        self.on_device.copy_(self.buffer, non_blocking=True)


def host_slices(tensor: torch.Tensor, most_bytes: int) -> list[HostSlice]:
    """Return the slices of a device's message, each of at most ``most_bytes``; one for an empty tensor.

    Each slice has its own buffer; PyTorch's allocator keeps pinned memory, so buffers of equal size are reused.

    Raises:
        ValueError: the tensor is not dense.
    """
    check_dense(tensor)
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    pinned, values = tensor.device.type == "cuda", max(1, most_bytes // tensor.element_size())
    return [HostSlice(p, torch.empty(p.shape, dtype=p.dtype, pin_memory=pinned)) for p in flat.split(values)]
