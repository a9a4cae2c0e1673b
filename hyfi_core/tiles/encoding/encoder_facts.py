"""Trials of an encoder before its first step: a call for one tile beside a call for three.

::

    tile 2 alone          features a, shapes of random numbers, bytes
    tiles 0, 1, 2         features b, shapes of random numbers, bytes        a = b[2], or the encoder mixes tiles

Both calls run forward and backward with the module's present flags; buffers are as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hyfi_core.errors import RequestError
from hyfi_core.runtime.executor import without_grad
from hyfi_core.runtime.saving.weight_shards import is_shard
from hyfi_core.tiles.encoding.encoder_call import EncoderCall
from hyfi_core.tiles.keyed_draws import DrawKey, DrawnShape, KeyedDraws, NoDrawsInBackward
from hyfi_core.tiles.peak_meter import PeakMeter

_TILES = 3
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3}
_LOOSE = 6e-2
"""Largest difference between one tile and the same among others, as a share of the largest feature, in 16 bits."""


@dataclass(frozen=True)
class TileBytes:
    """Memory that grows with the tiles of a chunk: fixed bytes, and bytes for each tile.

    Attributes:
        fixed: bytes of a chunk, whatever its size.
        each: bytes for each tile of a chunk.
    """

    fixed: int
    each: int

    def of(self, tiles: int) -> int:
        """Return the bytes of a chunk."""
        return self.fixed + self.each * tiles

    @classmethod
    def through(cls, one: int, several: int) -> TileBytes:
        """Return the line through the bytes of a chunk of one tile and of a chunk of ``_TILES`` tiles."""
        # Rounded up, because a budget must not be too small.
        each = max(0, -(-(several - one) // (_TILES - 1)))
        return cls(max(0, one - each), each)


@dataclass(frozen=True)
class EncoderFacts:
    """What the trials of an encoder have shown; they hold while its flags (training mode, requires_grad) stay.

    Attributes:
        features: length of a feature vector.
        dtype: dtype of features.
        drawn_shapes: shapes of the random numbers that a call for one tile draws, in order.
        tile_by_tile: whether each tile needs a call of its own, because of how random numbers are laid out.
        trained: names of the encoder's parameters that get gradients.
        kept: bytes of a chunk's activations.
        peak: bytes of a chunk's forward and backward.
        forward: bytes of a chunk's forward that keeps nothing.
    """

    features: int
    dtype: torch.dtype
    drawn_shapes: tuple[DrawnShape, ...]
    tile_by_tile: bool
    trained: frozenset[str]
    kept: TileBytes
    peak: TileBytes
    forward: TileBytes


@dataclass(frozen=True)
class _Trial:
    features: torch.Tensor
    trained: frozenset[str]
    kept: int
    peak: int


def tried(call: EncoderCall, tile_shape: tuple[int, ...], key: DrawKey, backward: bool) -> EncoderFacts:
    """Try an encoder and return what that showed; its buffers are as before.

    Args:
        call: calls the encoder; its batch norms are tried with running statistics.
        tile_shape: ``(3, T, T)``.
        key: key of random numbers.
        backward: whether a backward is tried, too.

    Raises:
        RequestError: the encoder cannot be computed chunk by chunk; the message says why.
    """
    _check_norms(call)
    # Exact norms communicate, but a trial runs on this rank alone.
    call, generator = replace(call, exact=False), torch.Generator().manual_seed(7)
    tiles = torch.rand((_TILES, *tile_shape), generator=generator).to(call.device, call.dtype)
    buffers = {name: buffer.clone() for name, buffer in call.encoder.named_buffers()}
    try:
        with call.norms():
            drawn_shapes = _drawn(call, tiles[-1:], key)
            one = _trial(call, tiles[-1:], key, [_TILES - 1], drawn_shapes, backward)
            several = _trial(call, tiles, key, range(_TILES), drawn_shapes, backward)
            _check_buffers(call, buffers)
            # True if a tile's random numbers depend on the other tiles of its call.
            tile_by_tile = _needs_single_calls(call, tiles, key, drawn_shapes, one, several)
    finally:
        with torch.no_grad():
            for name, buffer in call.encoder.named_buffers():
                # Only buffers that differ: each write would count as a change of the model.
                if not torch.equal(buffer, buffers[name]):
                    buffer.copy_(buffers[name])
    # Lines through two measurements: bytes of a chunk of any size.
    kept, peak = (TileBytes.through(getattr(one, what), getattr(several, what)) for what in ("kept", "peak"))
    # A forward that keeps nothing needs the rest of the peak, without the activations kept for backward.
    forward = TileBytes.through(max(0, one.peak - one.kept), max(0, several.peak - several.kept))
    features = several.features
    return EncoderFacts(
        features=features.shape[1],
        dtype=features.dtype,
        drawn_shapes=drawn_shapes,
        tile_by_tile=tile_by_tile,
        trained=several.trained,
        kept=kept,
        peak=peak,
        forward=forward,
    )


def _check_norms(call: EncoderCall) -> None:
    """Refuse batch norms that always take their statistics from the tiles of a call."""
    for name, module in call.encoder.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise RequestError(
                f"{name!r} of the encoder is a {type(module).__name__} without running statistics, so that features of "
                f"a tile depend on the other tiles of a call; use track_running_stats=True"
            )


def _drawn(call: EncoderCall, tile: torch.Tensor, key: DrawKey) -> tuple[DrawnShape, ...]:
    """Return the shapes of the random numbers that a call for one tile draws."""
    with without_grad(), KeyedDraws(key, "encoder", [0]) as draws:
        call(tile, key, [0], ())
    return tuple(draws.shapes)


def _trial(
    call: EncoderCall,
    tiles: torch.Tensor,
    key: DrawKey,
    numbers: range | list[int],
    drawn_shapes: tuple[DrawnShape, ...],
    train: bool,
) -> _Trial:
    """Run forward and, if trained, backward for some tiles; return their features, and the bytes that both took.

    Args:
        call: calls the encoder.
        tiles: ``(n, C, h, w)``.
        key: key of random numbers.
        numbers: numbers of these tiles in their slide, on which their random numbers depend.
        drawn_shapes: shapes of the random numbers that a call for one tile draws; empty if not known yet.
        train: whether gradients are computed.
    """
    named = {name: p for name, p in call.encoder.named_parameters() if p.requires_grad}
    with PeakMeter() as meter, torch.set_grad_enabled(train and bool(named)):
        features = call(tiles, key, numbers, drawn_shapes)
        # What is alive after the forward: the features, and what their graph has saved.
        kept, trained = meter.live_bytes, frozenset[str]()
        if features.requires_grad:
            with NoDrawsInBackward():
                gradients = _gradients(features.sum(), [*named.values()])
            trained = frozenset(n for n, gradient in zip(named, gradients, strict=True) if gradient is not None)
            del gradients
    return _Trial(features.detach(), trained, kept, meter.peak_bytes)


def _gradients(total: torch.Tensor, parameters: list[torch.nn.Parameter]) -> Sequence[torch.Tensor | None]:
    """Return gradients, None for parameters that were not used; their ``grad`` stays as it was."""
    if not any(map(is_shard, parameters)):
        return torch.autograd.grad(total, parameters, allow_unused=True)
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    torch.autograd.backward(total)  # shards are not in the graph: their gradients arrive in ``grad`` only
    gradients = [parameter.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient
    return gradients


def _check_buffers(call: EncoderCall, before: dict[str, torch.Tensor]) -> None:
    """Refuse an encoder whose buffers have changed in the trials."""
    for name, buffer in call.encoder.named_buffers():
        if not torch.equal(buffer, before[name]):
            raise RequestError(
                f"buffer {name!r} of the encoder changes with every call, so that its values would depend on the "
                f"number of chunks; put its module in eval(), or remove what changes it (such as spectral_norm)"
            )


def _needs_single_calls(
    call: EncoderCall,
    tiles: torch.Tensor,
    key: DrawKey,
    drawn_shapes: tuple[DrawnShape, ...],
    one: _Trial,
    several: _Trial,
) -> bool:
    """Return whether tiles must be encoded one by one, because random numbers depend on the other tiles of a call.

    Args:
        call: calls the encoder.
        tiles: tiles of the trials, ``(n, 3, T, T)``.
        key: key of random numbers.
        drawn_shapes: shapes of the random numbers that a call for one tile draws.
        one: the trial of the last tile alone.
        several: the trial of all tiles.

    Raises:
        RequestError: the encoder mixes the tiles of a call even without random numbers.
    """
    if _equal_to_rounding(one.features[0], several.features[-1]):
        return False
    if drawn_shapes:  # perhaps only the random numbers differ
        flags = [(module, module.training) for module in call.encoder.modules()]
        # Without dropout, a difference that remains comes from the encoder itself.
        call.encoder.eval()
        try:
            with without_grad():
                quiet = [call(some, key, range(len(some)), ())[-1] for some in (tiles[-1:], tiles)]
        finally:
            for module, flag in flags:
                module.training = flag
        if _equal_to_rounding(*quiet):
            return True
    norms = [name for name, m in call.encoder.named_modules() if "norm" in type(m).__name__.lower() and m.training]
    suspects = f" (a norm over the whole call? {norms[0]!r} is in training mode)" if norms else ""
    raise RequestError(
        f"the encoder mixes the tiles of a call{suspects}: features of a tile depend on the other tiles, so that they "
        f"cannot be computed in chunks; use norms over each tile (LayerNorm, GroupNorm) or with running statistics"
    )


def _equal_to_rounding(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two feature vectors are equal, but for the rounding of their dtype."""
    scale = float(other.abs().max())
    return float((one - other).abs().max()) <= _TOLERANCE.get(one.dtype, _LOOSE) * max(scale, 1e-6)
