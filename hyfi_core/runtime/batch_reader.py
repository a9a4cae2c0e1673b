"""Reading the batch: for each first stage on this rank, its box of the samples whose micro-batches begin there.

two directions, four micro-batches     stage 0, direction 0: its box of samples of micro-batches 0, 1
                                       stage 0, direction 1: its box of samples of micro-batches 2, 3
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils import _pytree

from hyfi_core.capture.program import Program
from hyfi_core.errors import RequestError
from hyfi_core.ops.redistribute import is_channels_last
from hyfi_core.plan.batch_shapes import Shape
from hyfi_core.plan.box import Box
from hyfi_core.plan.input_part import InputPart
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.rules.table import facts_of
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.lowered_model import Key, LoweredModel


@runtime_checkable
class ImageParts(Protocol):
    """A batch that is read box by box."""

    def read(self, box: Box, first: int, stop: int) -> torch.Tensor:
        """Return ``(stop - first, C, h, w)``."""
        ...


@runtime_checkable
class PixelParts(ImageParts, Protocol):
    """A batch that is computed from pixels, always the same: to save memory, only these are kept.

    Attributes:
        pixel_dtype: dtype of the pixels.
    """

    pixel_dtype: torch.dtype

    def pixels(self, box: Box, first: int, stop: int) -> torch.Tensor:
        """Return ``(stop - first, …, h, w)``, from which ``prepare`` makes what ``read`` returns."""
        ...

    def prepare(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return ``(stop - first, C, h, w)``, computed from pixels in new memory."""
        ...


Images = torch.Tensor | Callable[[Box], torch.Tensor] | ImageParts
_LEAST_USES = 500
"""Positions at which a weight must be used for channels-last to be faster than reordering the weight.

One core, time of a step against contiguous maps: ResNet-50 of 256 x 256 pixels (213 positions) 1.07, of 384 x 384 (480)
0.95, of 512 x 512 (853) 0.92; ResNet-18 of 384 x 384 (445) 1.03, of 512 x 512 (790) 0.99."""
MemoryFormat = Literal["auto", "channels_last", "as_given"]
"""Memory format of maps: channels-last where faster, always, or as images and weights are."""


def lays_channels_last(
    memory_format: MemoryFormat,
    model: nn.Module,
    autocast: torch.dtype | None,
    program: Callable[[], Program],
    grids: Sequence[tuple[int, int]],
    device: torch.device | None = None,
) -> bool:
    """Return whether images are converted to channels-last, which all maps then inherit.

    It is faster for dense convolutions in dtypes with channels-last kernels: float32 and 16 bits on a CPU, 16 bits on a
    GPU. Weights are not converted: convolutions reorder them, and backward reorders their gradients. On a GPU and for
    16 bits this takes negligible time; for float32 on a CPU it must pay (see ``_LEAST_USES``).

    Args:
        memory_format: the user's choice.
        model: the user's module.
        autocast: dtype of autocast.
        program: captures the model; called only if its shapes decide.
        grids: (rows, columns) of each stage's grid of ranks.
        device: device on which the model will be, if it is on the meta device now.
    """
    if memory_format != "auto":
        return memory_format == "channels_last"
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d) and module.groups == 1]
    # Not layer.weight: where it is computed (spectral norm), reading it would advance the power iteration.
    kernels = (next(layer.parameters(), None) for layer in layers if max(layer.kernel_size) > 1)
    kernel = next((kernel for kernel in kernels if kernel is not None), None)
    if kernel is None:
        return False
    dtype = autocast or kernel.dtype
    target = device if device is not None and kernel.is_meta else kernel.device
    if dtype == torch.float32 and target.type == "cpu":
        # Each rank reorders all weights, but uses them at its share of the positions only.
        return _uses_of_weights(program()) >= _LEAST_USES * max(map(prod, grids))
    return dtype in (torch.bfloat16, torch.float16)


def _uses_of_weights(program: Program) -> float:
    """Return at how many output positions a weight is used, on average over dense kernels larger than 1 × 1."""
    weights, uses = 0, 0
    for op in program.operators:
        if not facts_of(op).kind.endswith("convolution"):
            continue
        x_shape, kernel_shape, y_shape = (program.values[name].shape for name in (*op.inputs[:2], op.first_output))
        if kernel_shape[1] == x_shape[1] and prod(kernel_shape[2:]) > 1:  # dense, without groups
            weights += prod(kernel_shape)
            uses += prod(kernel_shape) * y_shape[0] * prod(y_shape[2:])
    return uses / max(weights, 1)


def batch_shape(images: Images, expected: Shape) -> Shape:
    """Return the shape of a batch.

    A batch that is read box by box has the expected shape; its attribute ``samples``, if any, replaces B.

    Raises:
        RequestError: a tensor is not (B, C, H, W), or the batch is not one of ``Images``.
    """
    if not isinstance(images, (torch.Tensor, ImageParts)) and not callable(images):
        raise RequestError(
            f"images are a {_type_name(images)}; pass a tensor of shape ({expected[0]}, {expected[1]}, H, W), or a "
            f"function Box -> tensor that returns any box of them"
        )
    if not isinstance(images, torch.Tensor):
        return getattr(images, "samples", expected[0]), *expected[1:]
    if images.dim() != 4:
        raise RequestError(f"images have shape {tuple(images.shape)}; pass the whole batch as (B, C, H, W)")
    batch, channels, height, width = images.shape
    return batch, channels, height, width


def check_labels(labels: torch.Tensor, batch: int) -> None:
    """Check that there is a label for every image.

    Raises:
        RequestError: there are more or fewer, or they are not a tensor.
    """
    if not isinstance(labels, torch.Tensor):
        raise RequestError(
            f"labels are a {_type_name(labels)}; pass a tensor of first dim {batch}, the batch (targets: columns)"
        )
    if labels.shape[:1] != (batch,):
        raise RequestError(
            f"labels have shape {tuple(labels.shape)}, but the batch has {batch} images; pass {batch} labels"
        )


def read_part(images: Images, part: InputPart, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor ``(samples, C, h, w)`` of one part of a batch, in ``dtype`` or, both floating-point, another.

    Raises:
        RequestError: a reader returned something else than a tensor of this shape, or the model does not take its
            dtype.
    """
    box = part.box
    if isinstance(images, torch.Tensor):
        # A cut-out has gaps; it is made dense in the format of the batch, which all maps inherit.
        order = torch.channels_last if is_channels_last(images) else torch.contiguous_format
        _check_images(images, "the batch", dtype)
        cut = images[part.first : part.stop, :, box.y0 : box.y1, box.x0 : box.x1]
        return cut.contiguous(memory_format=order)
    if isinstance(images, ImageParts):
        local, name = images.read(box, part.first, part.stop), f"images.read({box}, {part.first}, {part.stop})"
    else:
        local, name = images(box), f"images({box})"
        # A function of a box alone returns all samples; a direction needs a part of them.
        local = local[part.first : part.stop] if isinstance(local, torch.Tensor) else local
    return _checked_part(local, name, part, channels, dtype)


def _checked_part(local: Any, call: str, part: InputPart, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``local``, the result of the user's ``call`` for a part, if it is a tensor as expected.

    Raises:
        RequestError: it is no tensor, has another shape, or a dtype that cannot be converted to ``dtype``.
    """
    if not isinstance(local, torch.Tensor):
        raise RequestError(f"{call} returned a {_type_name(local)}; it must return a tensor (B, C, h, w)")
    expected = (part.stop - part.first, channels, *part.box.shape)
    if tuple(local.shape) != expected:
        raise RequestError(f"{call} returned shape {tuple(local.shape)}; {expected} was requested")
    _check_images(local, f"what {call} returned", dtype)
    return local


def _check_images(images: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    """Refuse images of a dtype with which the model was not captured; floating-point dtypes are converted."""
    if images.dtype == dtype or (images.is_floating_point() and dtype.is_floating_point):
        return
    if dtype.is_floating_point:
        raise RequestError(
            f"{name} is {images.dtype}; the engine expects floating-point images: convert them to the model's input "
            f"range, for instance images.float() / 255, or, if the model itself takes {images.dtype}, pass "
            f"parallelize(..., image_dtype={images.dtype})"
        )
    raise RequestError(f"{name} is {images.dtype}, but the engine was created with image_dtype={dtype}; convert it")


def _type_name(value: object) -> str:
    """Return a type's name for messages: ``list``, ``numpy.ndarray``."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def uploaded(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device; the host does not wait for it, and may change its memory at once.

    A copy of pageable memory to a GPU would wait for all work before it, so it goes through pinned memory, which the
    allocator keeps until the copy is done.
    """
    if tensor.device == device or device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class ImageBatch:
    """A replica's batch in one call of the engine, with the shapes on which all ranks have agreed.

    Attributes:
        images: images of the whole batch.
        shape: ``(B, C, H, W)`` of the whole batch.
        micro: ``(b, C, H, W)`` of one micro-batch.
    """

    images: Images
    shape: Shape
    micro: Shape

    @property
    def count(self) -> int:
        """Number of micro-batches."""
        return self.shape[0] // self.micro[0]

    def is_on(self, device: torch.device) -> bool:
        """Whether the images are a tensor on a device, so that reading a part of them is a copy of memory at most."""
        return isinstance(self.images, torch.Tensor) and self.images.device == device


@dataclass(frozen=True)
class LocalInput:
    """What one rank, or one cell of it, reads of a batch.

    Attributes:
        batch: the batch.
        parts: (stage, direction) -> the box and samples that it needs.
        local: the pixels of the parts; empty for a cell, which reads a micro-batch when it needs it.
        counted: parts that a cell has read so far, which the counts of traffic already include.
    """

    batch: ImageBatch
    parts: Mapping[Key, InputPart]
    local: Mapping[Key, torch.Tensor]
    counted: set[InputPart] = field(default_factory=set)


class Reader:
    """Reads this rank's boxes.

    Args:
        plan: directions and micro-batches.
        shape: shape of the whole batch for which the engine was created.
        groups: communication groups, which count the read bytes.
        device: device of the result.
        dtype: that the model takes: floating-point images are converted, others must have it.
        channels_last: whether images are converted to this format.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        shape: Shape,
        groups: Groups,
        device: torch.device,
        dtype: torch.dtype,
        channels_last: bool = False,
    ) -> None:
        self._plan = plan
        self._shape = shape
        self._groups = groups
        self._device = device
        self._dtype = dtype
        self._order = torch.channels_last if channels_last else torch.preserve_format

    def training_parts(self, lowered: LoweredModel, batch: int) -> dict[Key, InputPart]:
        """Return (stage, direction) -> its box and its direction's samples, for stages that read images in training."""
        count = batch // self._plan.directions
        return {
            (index, direction): InputPart(stage.ranked.read_box, direction * count, (direction + 1) * count)
            for (index, direction), stage in sorted(lowered.hosted.items(), key=lambda item: item[0])
            if stage.reads_image
        }

    def prediction_parts(self, lowered: LoweredModel, batch: int) -> dict[Key, InputPart]:
        """Return (stage, direction) -> its box and all ``batch`` samples, for prediction: direction 0 only."""
        return {
            (index, direction): InputPart(stage.ranked.read_box, 0, batch)
            for (index, direction), stage in lowered.hosted.items()
            if stage.reads_image and direction == 0
        }

    def read(
        self, images: Images, parts: Mapping[Key, InputPart], already_counted: Collection[InputPart] = ()
    ) -> dict[Key, torch.Tensor]:
        """Return (stage, direction) -> pixels; equal parts are read once. ``already_counted``: not as traffic again."""
        pixels: dict[InputPart, torch.Tensor] = {}
        for part in dict.fromkeys(parts.values()):  # without repetitions, in order
            read = read_part(images, part, self._shape[1], self._dtype)
            self._groups.all.counts.count("input", messages=0, sent_bytes=0 if part in already_counted else read.nbytes)
            pixels[part] = uploaded(read, self._device).to(dtype=self._dtype, memory_format=self._order)
        return {key: pixels[part] for key, part in parts.items()}

    def read_pixels(
        self, images: PixelParts, part: InputPart
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Return the pixels of a part, in new memory, and the function that computes images from them."""
        pixels = images.pixels(part.box, part.first, part.stop)
        if not isinstance(pixels, torch.Tensor) or pixels.dtype != images.pixel_dtype:
            description = pixels.dtype if isinstance(pixels, torch.Tensor) else _type_name(pixels)
            raise RequestError(
                f"images.pixels({part.box}, {part.first}, {part.stop}) returned {description}; images say "
                f"that their pixel_dtype is {images.pixel_dtype}"
            )
        self._groups.all.counts.count("input", messages=0, sent_bytes=pixels.nbytes)

        def prepare(pixels: torch.Tensor) -> torch.Tensor:
            local = _checked_part(images.prepare(pixels), "images.prepare", part, self._shape[1], self._dtype)
            return local.to(self._device, self._dtype, memory_format=self._order)

        # On a CPU this is still the caller's tensor, whose memory a pager may not free.
        return uploaded(pixels, self._device).clone(), prepare

    def in_format_of(self, images: Images, output: Any) -> Any:
        """Return the model's output, contiguous if only this reader has made the images channels-last."""
        if self._order != torch.channels_last or (isinstance(images, torch.Tensor) and is_channels_last(images)):
            return output
        return _pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.contiguous(), output)

    def training_batch(self, images: Images, labels: torch.Tensor) -> ImageBatch:
        """Return a batch to train with.

        Raises:
            RequestError: the batch cannot be divided, has the wrong size, or not as many labels.
        """
        shape = batch_shape(images, self._shape)
        micro = self.micro_shape(shape, strict=True)
        check_labels(labels, shape[0])
        return ImageBatch(images, shape, micro)

    def evaluation_batch(self, images: Images) -> ImageBatch:
        """Return a batch to predict; one that cannot be divided is one micro-batch.

        Raises:
            RequestError: it is not a batch of images.
        """
        shape = batch_shape(images, self._shape)
        return ImageBatch(images, shape, self.micro_shape(shape))

    def micro_shape(self, shape: Shape, strict: bool = False) -> Shape:
        """Return the shape of one micro-batch; unless ``strict``, a batch that cannot be divided is one micro-batch.

        Raises:
            RequestError: it cannot be divided, or has the wrong size for this replica.
        """
        batch, count = shape[0], self._plan.microbatches
        if strict:
            check_share(self._plan, self._groups.replica_index, batch)
        if batch % count and strict:
            raise RequestError(
                f"a batch of {batch} images cannot be cut into {count} equal micro-batches; "
                f"use a batch of {max(1, batch // count) * count} or plan.microbatches={divisor(batch, count)}"
            )
        return (batch if batch % count else batch // count), *shape[1:]


def divisor(batch: int, count: int) -> int:
    """Return the largest number of equal micro-batches not above ``count``."""
    return max(n for n in range(1, count + 1) if batch % n == 0)


def check_share(plan: ParallelPlan, replica: int, batch: int) -> None:
    """Check that a replica gets the number of samples of ``plan.shares``.

    Raises:
        RequestError: it gets more or fewer.
    """
    if plan.shares and batch != plan.shares[replica]:
        raise RequestError(
            f"replica {replica} takes {plan.shares[replica]} of every {sum(plan.shares)} samples (plan.shares), but "
            f"got a batch of {batch}; pass {plan.shares[replica]}"
        )
