"""How many tiles an encoder is called for at once, and how many chunks keep their activations for backward.

::

    memory_bytes  ├ the process ┤├ features ┤├ aggregator ┤├ one chunk at work ┤├ kept ┤├ kept ┤├ kept ┤┄┄ free ┄┄│

Chunks that do not fit are computed again in backward; the last ones are kept first, because they are needed first.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.process_memory import available_bytes, resident_bytes, return_freed_now, return_what_is_freed
from hyfi_core.runtime.saving.weight_shards import own_part
from hyfi_core.tiles.encoding.encoder_facts import EncoderFacts
from hyfi_core.tiles.reading import Like

LARGEST_CHUNK = 32
"""Most tiles of a chunk: more were not faster on any device tried."""
_CHUNK_BYTES = 2**31
SLACK = 1.15
"""Factor for workspaces of operators and for the allocator's own memory."""
_HEAP_BYTES = 8 << 20
"""Bytes of small blocks that glibc keeps, see `return_what_is_freed`."""
LARGE_BLOCK_BYTES = 16 << 20
"""Blocks that glibc returns at once in a process with a limit: smaller ones are cleared too often, which takes time."""
_WITH_HOLES = 1.6
"""The heap grows by at most this many times a chunk's tensors: smaller blocks leave holes in it (measured: 1.48)."""


@dataclass(frozen=True)
class MemoryNeeds:
    """What a step needs on this rank, in bytes.

    Attributes:
        lasting: features, the aggregator's graph, gradients and new optimizer states, which live through the step.
        working: the largest chunk at work, with the next one being read.
        kept: activations of a chunk that is kept.
    """

    lasting: int
    working: int
    kept: int


@dataclass(frozen=True)
class KeepingRoom:
    """Decides before each chunk whether it may keep its activations, by the memory that the process really has.

    Sums of tensors would not do: the allocator holds more.

    Attributes:
        needs: memory that the step needs.
        memory_bytes: limit of this process, or of the GPU's memory; None: no limit.
        device: where the encoder runs.
    """

    needs: MemoryNeeds
    memory_bytes: int | None
    device: torch.device

    def fits_another(self) -> bool:
        """Whether the memory in use leaves enough for a chunk and the rest of the step."""
        if self.memory_bytes is None:
            return True
        # Enough for a chunk that keeps its activations, and for one at work, whichever needs more.
        more_bytes = self.needs.lasting + int(max(self.needs.working, self.needs.kept) * SLACK) + _HEAP_BYTES
        return _used_bytes(self.device) + more_bytes <= self.memory_bytes

    def prepare(self, backward: bool) -> None:
        """Return freed memory to the system before a chunk is encoded, if the heap could otherwise exceed the limit.

        Args:
            backward: whether the chunk is driven backward next. If the limit is too close for a heap with holes,
                blocks of 1 MB are returned at once from then on, which takes time.
        """
        if self.memory_bytes is None or self.device.type != "cpu":
            return
        # A chunk lets the heap grow by more than its tensors, because smaller blocks leave holes.
        most_bytes = self.memory_bytes - int(self.needs.working * _WITH_HOLES)
        if resident_bytes() <= most_bytes:
            return
        return_freed_now()
        if backward and resident_bytes() > most_bytes:
            return_what_is_freed()


def chunk_size(facts: EncoderFacts, memory_bytes: int | None, requested: int | None) -> int:
    """Return the number of tiles of a chunk; independent of free memory, so that a resumed run computes the same.

    Args:
        facts: facts of the encoder.
        memory_bytes: the plan's limit.
        requested: the user's number of tiles; None: as many as fit, at most ``LARGEST_CHUNK``.
    """
    if facts.tile_by_tile:  # its random numbers need a call for each tile
        return 1
    if requested is not None:
        return requested
    room = _CHUNK_BYTES if memory_bytes is None else min(_CHUNK_BYTES, memory_bytes // 4)
    peak = facts.peak  # bytes of a forward and backward: ``fixed``, and ``each`` for every tile
    return max(1, min(LARGEST_CHUNK, (room - peak.fixed) // max(1, peak.each)))


def chunks_kept(needs: MemoryNeeds, memory_bytes: int | None, device: torch.device, sharers: int, chunks: int) -> int:
    """Return how many chunks of this rank keep their activations.

    Args:
        needs: memory that the step needs.
        memory_bytes: limit of this process, or of the GPU's memory; None: half of what is free.
        device: where the encoder runs.
        sharers: number of ranks that share the free memory.
        chunks: number of chunks of this rank.

    Raises:
        RequestError: not even one chunk at a time fits.
    """
    kept_bytes, needed_bytes = max(1, int(needs.kept * SLACK)), needs.lasting + int(needs.working * SLACK)
    used = _used_bytes(device)
    if memory_bytes is not None and device.type == "cpu" and memory_bytes - used - needed_bytes < chunks * kept_bytes:
        return_freed_now()  # memory that earlier steps have freed must not count as used
        used = _used_bytes(device)
    # Without a limit, half of what is free, divided among the ranks that share it.
    limit = memory_bytes if memory_bytes is not None else used + _free_bytes(device) // (2 * sharers)
    free = limit - used - needed_bytes
    if free < 0:
        if memory_bytes is None:
            return 0  # without a limit, too little memory means that all chunks are computed again
        raise RequestError(
            f"plan.memory_bytes is {memory_bytes:,}, but a step needs {limit - free:,} bytes: {used:,} are in use, "
            f"{needs.lasting:,} for features, aggregator and gradients, {int(needs.working * SLACK):,} for one chunk; "
            f"set it to at least {limit - free:,}, or use smaller chunks (chunk=)"
        )
    return min(chunks, free // kept_bytes)


def read_bytes(like: Like, input_dtype: torch.dtype, ahead: int) -> int:
    """Return the bytes that reading needs for each tile of a chunk: the chunk at work and those read ahead.

    Args:
        like: shape and dtype of a tile as it is read.
        input_dtype: dtype of the encoder's input.
        ahead: chunks that are read ahead.
    """
    shape, dtype = like
    as_read, as_input = prod(shape) * dtype.itemsize, prod(shape) * input_dtype.itemsize
    # The chunk at work and the next one may exist in both forms.
    return 2 * (as_read + as_input) + (ahead - 1) * as_read


def new_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None, reduces: bool) -> int:
    """Return the bytes of gradients, and of optimizer states, that do not exist yet."""
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = sum(own_part(p).nbytes for p in trained)
    # Where ranks reduce, gradients exist twice: as ``grad`` and in the buckets of messages.
    gradients = sum(own_part(p).nbytes for p in trained if p.grad is None) * (2 if reduces else 1)
    # Two moments, as of Adam, which the first update creates.
    states = 2 * weights if optimizer is not None and not optimizer.state else 0
    return gradients + states


def _used_bytes(device: torch.device) -> int:
    # Reserved rather than allocated bytes, because memory that PyTorch's allocator holds is not free for others.
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_bytes()


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
