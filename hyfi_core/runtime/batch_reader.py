"""Reading: which boxes of which samples a rank needs of a batch, and the batch cut into micro-batches."""

from __future__ import annotations

import torch

from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.compiled import Compiled
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.images import Images, InputPart, Shape, batch_shape, read_part

Key = tuple[int, int]


class Reader:
    """Reads this rank's boxes.

    Args:
        plan: directions and micro-batches.
        shape: of the whole batch that the engine was made for.
        groups: where what is read is counted.
        device: where it goes.
        dtype: what it becomes.
    """

    def __init__(
        self, plan: ParallelPlan, shape: Shape, groups: Groups, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._plan = plan
        self._shape = shape
        self._groups = groups
        self._device = device
        self._dtype = dtype

    def training_parts(self, compiled: Compiled, batch: int) -> dict[Key, InputPart]:
        """Return what each stage that reads the image needs in training: its direction's share of the samples."""
        share = batch // self._plan.directions
        return {
            key: InputPart(stage.ranked.read_box, key[1] * share, (key[1] + 1) * share)
            for key, stage in sorted(compiled.hosted.items(), key=lambda item: item[0])
            if stage.reads_image
        }

    def prediction_parts(self, compiled: Compiled, batch: int) -> dict[Key, InputPart]:
        """Return what prediction reads: all samples, by direction 0."""
        return {
            key: InputPart(stage.ranked.read_box, 0, batch)
            for key, stage in compiled.hosted.items()
            if stage.reads_image and key[1] == 0
        }

    def read(self, images: Images, parts: dict[Key, InputPart]) -> dict[Key, torch.Tensor]:
        """Return (stage, direction) -> its box of its samples; what two stages need alike is read once."""
        found: dict[InputPart, torch.Tensor] = {}
        for part in parts.values():
            if part not in found:
                local = read_part(images, part)
                self._groups.all.counts.count("input", 0, local.numel() * local.element_size())
                found[part] = local.to(device=self._device, dtype=self._dtype)
        return {key: found[part] for key, part in parts.items()}

    def batch_shape(self, images: Images) -> Shape:
        """Return the shape of the batch; of one read by boxes its ``samples``, else those the engine is made for."""
        return batch_shape(images, self._shape)

    def micro_shape(self, shape: Shape, strict: bool = False) -> Shape:
        """Return the shape of one micro-batch; unless ``strict`` a batch that does not divide is run whole.

        Raises:
            RequestError: it does not divide, or is not the replica's share.
        """
        batch, count = shape[0], self._plan.microbatches
        if strict:
            check_share(self._plan, self._groups.index, batch)
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
    """Check that a replica is given as many samples as the plan says, where it says so.

    Raises:
        RequestError: it is given more or fewer.
    """
    if plan.shares and batch != plan.shares[replica]:
        raise RequestError(
            f"replica {replica} takes {plan.shares[replica]} of every {sum(plan.shares)} samples (plan.shares), and is "
            f"given a batch of {batch}; give it {plan.shares[replica]}"
        )
