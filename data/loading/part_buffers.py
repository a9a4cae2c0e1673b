"""Buffers of received pixels: on the host, pinned for a GPU, and their copies there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from data.loading.decode import BANDS
from hyfi_core.plan.box import Box
from hyfi_core.plan.input_part import InputPart


class PartBuffers:
    """Parts of a batch's images: a host buffer for each part and, if the device is a GPU, copies there.

    Args:
        parts: The parts of a batch to receive.
        device: Device of the images.
        stream: Stream for the copies, if the device is a GPU.
    """

    def __init__(
        self, parts: Sequence[InputPart], device: torch.device, stream: torch.cuda.Stream | None = None
    ) -> None:
        self._parts, self._device, self._stream = tuple(parts), device, stream
        shapes = [(part.stop - part.first, BANDS, *part.box.shape) for part in parts]
        # Pinned: without it, `non_blocking` copies would go through a buffer of the driver and block.
        self.buffers = [torch.empty(shape, dtype=torch.uint8, pin_memory=stream is not None) for shape in shapes]
        self._images = self.buffers  # or their copies on the device, once `upload` has started these
        self._copied: torch.cuda.Event | None = None  # when the copies are done

    def of_sample(self, position: int) -> list[torch.Tensor]:
        """Return the buffers for the parts of one sample of the batch."""
        pairs = zip(self._parts, self.buffers, strict=True)
        return [buffer[position - part.first] for part, buffer in pairs if part.has_sample(position)]

    def upload(self) -> None:
        """Start the copies to the device, if they have not been started."""
        if self._stream is not None and self._copied is None:
            with torch.cuda.stream(self._stream):
                self._images = [buffer.to(self._device, non_blocking=True) for buffer in self.buffers]
                self._copied = torch.cuda.Event()
                self._copied.record(self._stream)
        # Devices other than CUDA: copied at once, in the order of the caller's work.
        elif self._stream is None and self._device.type != "cpu":
            self._images = [buffer.to(self._device) for buffer in self.buffers]

    def use(self) -> None:
        """Make the current stream wait for the copies, and keep their memory until the stream's work is done."""
        if self._copied is not None:
            current = torch.cuda.current_stream(self._device)
            # The stream waits, not the host: the copy may still run when this returns.
            current.wait_event(self._copied)
            # The tensors were allocated on the stream of the copies. Without `record_stream`, their memory would go to
            # another copy as soon as they are released, while the current stream may still read it.
            for images in self._images:
                images.record_stream(current)

    def reuse(self) -> None:
        """Wait until the copies are done, so that the buffers may be overwritten."""
        if self._copied is not None:
            # The host must wait here: the next message is received into the pinned memory that the copy reads.
            self._copied.synchronize()
            self._copied = None
        self._images = self.buffers

    def read(self, box: Box, first: int, stop: int) -> torch.Tensor:
        """Return a box of the samples ``[first, stop)``; see :class:`data.loading.feed.BatchPixels`.

        Raises:
            ValueError: No part covers the box.
        """
        for part, images in zip(self._parts, self._images, strict=True):
            if part.covers(box, first, stop):
                rows, columns = box.relative_to(part.box).slices()
                return images[first - part.first : stop - part.first, :, rows, columns]
        raise ValueError(not_sent(InputPart(box, first, stop), self._parts))


def not_sent(requested: InputPart, parts: Sequence[InputPart]) -> str:
    """Return the message for a box that the loaders do not send."""
    available = ", ".join(f"{part.box} of samples {part.first} to {part.stop}" for part in parts)
    return (
        f"{requested.box} of samples {requested.first} to {requested.stop} was requested, but the loaders send "
        f"{available or 'nothing'}"
    )
