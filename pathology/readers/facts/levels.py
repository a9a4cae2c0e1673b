"""Checks of the levels of a pyramid: a level is kept if its size fits the finest level, and it shows the same picture.

```
level 0   2048 × 2048
level 1   1024 × 1024    2 in both directions                      kept, if it shows what level 0 shows
level 2    256 ×  768    8 in rows, 2.67 in columns: a macro       left out, noted
level 1   1024 × 1024    of a level 0 of 1900 × 1950, in whole tiles of 512: padded; 950 × 975 of it are the slide
```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hyfi_core.plan.box import Box
from pathology.errors import TileError
from pathology.readers.facts.slide_facts import Note
from pathology.readers.resample import make_taps, resample
from pathology.readers.source_level import RGB, SourceLevel, levels_of_sizes

LEVELS_FLAG = "levels_left_out"
_ROUNDING_PX = 2
_PATCH_PX = (16, 64)
"""Smallest and largest side of the compared patches, in pixels of the coarser level."""
_FINER_PX = 512
"""Side of the part of the finer level that is read for one patch."""
_PATCHES = 3
_OVERVIEW_PX, _OVERVIEW_SHARE = 2**18, 1 / 128
"""The coarsest level is read as a whole if it is smaller than one of these: pixels, or share of the finest level's."""
_FIXED_PLACES = ((0.5, 0.5), (0.35, 0.65), (0.65, 0.35), (0.3, 0.3), (0.7, 0.7))
"""Centres of the patches, as fractions of the slide, if the coarsest level is not read as a whole."""
_FLAT = 4.0
"""Standard deviation of grey values below which a patch has no structure to compare."""
_ALIKE = 0.45
"""Correlation of grey values: above 0.9 for scanners' levels, about 0 for other pictures."""
_ENOUGH, _SMALL_PX, _CLEARLY = 2, 2**25, 0.9
"""The first 2 places decide, or the first one of slides below 2**25 pixels, if they correlate by at least 0.9."""
_LARGEST_SHIFT = 30.0
"""Largest accepted difference between the mean colours of two levels."""

Read = Callable[[Box, int], RGB]
"""Reads a box of a level."""


@dataclass(frozen=True, slots=True)
class StatedLevel:
    """A level as the file states it: size and tile size, (height, width)."""

    size_px: tuple[int, int]
    tile_px: tuple[int, int]


@dataclass(frozen=True, slots=True)
class BelievedLevels:
    """Levels that passed the checks, with true sizes; ``kept``: their indices in the file; notes on the others."""

    levels: tuple[SourceLevel, ...]
    kept: tuple[int, ...]
    notes: tuple[Note, ...]


def believed_levels(stated: Sequence[StatedLevel], fitted: Sequence[SourceLevel | None], read: Read) -> BelievedLevels:
    """Return the levels whose size fits the finest level, and which show the same picture.

    Args:
        stated: The levels that the file states, finest first.
        fitted: The result of `fitted_levels`.
        read: Reads a box of a stated level, by its index; a patch with a `TileError` is not compared.
    """
    fitting = [level for level in fitted if level is not None]
    # Indices of the fitting levels among the stated ones: `unlike_levels` counts only fitting levels.
    indices = [k for k, level in enumerate(fitted) if level is not None]
    unlike = {indices[k] for k in unlike_levels(fitting, lambda box, k: read(box, indices[k]))}
    kept = tuple(k for k in indices if k not in unlike)
    levels = tuple(level for k, level in zip(indices, fitting, strict=True) if k not in unlike)
    left_out = (k for k in range(len(stated)) if k not in kept)
    notes = tuple(_left_out_note(k, stated[k], stated[0], fits=k in unlike) for k in left_out)
    return BelievedLevels(levels, kept, notes)


def fitted_levels(stated: Sequence[StatedLevel]) -> list[SourceLevel | None]:
    """Return the levels with their downsample, without padding; None for those that do not fit the first one."""
    finest = stated[0]
    plain = levels_of_sizes([level.size_px for level in stated])
    return [_fitted(finest, level, downsample) for level, downsample in zip(stated, plain, strict=True)]


def _fitted(finest: StatedLevel, level: StatedLevel, plain: SourceLevel) -> SourceLevel | None:
    """Return a level with the downsample that its size was rounded from; None if it does not fit the finest level.

    Args:
        finest: The finest level, as the file states it.
        level: The level, as the file states it.
        plain: The same level with its downsample by `levels_of_sizes`, the ratio of both sizes.
    """
    (height, width), (h, w) = finest.size_px, level.size_px
    # Whole and equal factors: nothing was rounded or padded.
    if plain.downsample[0] == plain.downsample[1] == round(plain.downsample[0]):
        return plain
    padded = _padded_factor(finest, level)
    if padded is not None:
        size = math.ceil(height / padded), math.ceil(width / padded)
        return replace(plain, height_px=size[0], width_px=size[1], downsample=(float(padded),) * 2)
    # The longer side gives the more precise factor.
    expected = (h, width / (height / h)) if height >= width else (height / (width / w), w)
    fits = abs(expected[0] - h) <= _ROUNDING_PX and abs(expected[1] - w) <= _ROUNDING_PX
    return plain if fits else None


def _padded_factor(finest: StatedLevel, level: StatedLevel) -> int | None:
    """Return the downsample, a power of two, of a level padded to whole tiles; None if it is not such a level."""
    if any(side % tile for side, tile in zip(level.size_px, level.tile_px, strict=True)):
        return None
    ratio = max(full / side for full, side in zip(finest.size_px, level.size_px, strict=True))
    # Minus 1e-9: the log of a power of two may be rounded up, and `ceil` would then return the next one.
    factor = 2 ** math.ceil(math.log2(ratio) - 1e-9)
    padded = (
        math.ceil(math.ceil(side / factor) / tile) * tile
        for side, tile in zip(finest.size_px, level.tile_px, strict=True)
    )
    return factor if tuple(padded) == level.size_px and factor > 1 else None


def unlike_levels(levels: Sequence[SourceLevel], read: Read) -> list[int]:
    """Return the indices of levels that show another picture than the finer levels.

    Each level is compared with the next finer level that was kept, in a few patches with structure. This decodes some
    tiles of each level, less than one in a hundred of a slide.

    Args:
        levels: Finest first.
        read: Reads a box of a level; a patch with a `TileError` is not compared.
    """
    if len(levels) < 2:
        return []
    places = _structured_places(levels, read)
    last_believed, unlike = 0, []
    for k in sorted(range(1, len(levels)), key=lambda k: levels[k].downsample):
        # Compare with the next finer level that was kept: the finest has many times more pixels to read.
        if _agree(levels, (last_believed, k), places, read):
            last_believed = k
        else:
            unlike.append(k)
    return unlike


def _left_out_note(index: int, level: StatedLevel, finest: StatedLevel, *, fits: bool) -> Note:
    """Return the note on a level that is not believed; ``fits``: whether its size fits the finest level."""
    (height, width), (h, w) = finest.size_px, level.size_px
    apart = f"it has {height / h:.4g} times fewer rows and {width / w:.4g} times fewer columns than the finest level"
    why = "it does not show what the finest level shows" if fits else apart
    return Note(LEVELS_FLAG, f"level {index} of {h} × {w} px (rows × columns) is left out: {why}")


def _structured_places(levels: Sequence[SourceLevel], read: Read) -> Sequence[tuple[float, float]]:
    """Return the centres, as fractions of the slide, of the most structured parts of the coarsest level."""
    finest, coarsest = levels[0], levels[-1]
    size_px = coarsest.height_px * coarsest.width_px
    # The coarsest level is read whole, if that does not take too long.
    if size_px > max(_OVERVIEW_PX, finest.height_px * finest.width_px * _OVERVIEW_SHARE):
        return _FIXED_PLACES
    try:
        grey = _grey(read(Box.of_size(coarsest.height_px, coarsest.width_px), len(levels) - 1))
    except TileError:
        return _FIXED_PLACES
    block = max(4, min(grey.shape) // 16)
    rows, columns = grey.shape[0] // block, grey.shape[1] // block
    if rows < 1 or columns < 1:
        return _FIXED_PLACES
    blocks = grey[: rows * block, : columns * block].reshape(rows, block, columns, block).std((1, 3))
    # The blocks with the most contrast, because plain glass is alike in any two pictures.
    best = np.argsort(blocks, axis=None)[::-1][:_PATCHES]
    scale = block / grey.shape[0], block / grey.shape[1]
    return [((k // columns + 0.5) * scale[0], (k % columns + 0.5) * scale[1]) for k in best.tolist()]


def _agree(
    levels: Sequence[SourceLevel], compared: tuple[int, int], places: Sequence[tuple[float, float]], read: Read
) -> bool:
    """Whether two levels show the same at some places; one or two places with a high correlation are enough.

    Args:
        levels: All levels of the file.
        compared: Indices of (the finer, the coarser) level.
        places: (y, x) of the places, as fractions of the slide.
        read: Reads a box of a level.
    """
    finer, coarser = (levels[k] for k in compared)
    ratio = (coarser.downsample[0] / finer.downsample[0], coarser.downsample[1] / finer.downsample[1])
    enough = _ENOUGH if levels[0].height_px * levels[0].width_px >= _SMALL_PX else 1
    pairs: list[tuple[RGB, RGB]] = []
    for position in places:
        box = _patch(finer, coarser, ratio, position)
        rows = int(box.y0 * ratio[0]), min(finer.height_px, math.ceil(box.y1 * ratio[0]))
        columns = int(box.x0 * ratio[1]), min(finer.width_px, math.ceil(box.x1 * ratio[1]))
        with suppress(TileError):
            wide = read(Box(*rows, *columns), compared[0])
            pairs.append((read(box, compared[1]).reshape(-1, 3), _reduced(wide, box.shape).reshape(-1, 3)))
        # A clear result: do not decode more tiles.
        if len(pairs) >= enough and _show_the_same(pairs, _CLEARLY):
            return True
    # Without a readable patch nothing speaks against the level.
    return not pairs or _show_the_same(pairs, _ALIKE) or _are_flat(pairs)


def _show_the_same(pairs: Sequence[tuple[RGB, RGB]], correlation: float) -> bool:
    """Whether patches ``(n, 3)`` of two levels have the same colours, and grey values correlated by ``correlation``."""
    finer, coarser = (np.concatenate(side) for side in zip(*pairs, strict=True))
    grey = finer.mean(1), coarser.mean(1)
    if np.abs(finer.mean(0) - coarser.mean(0)).max() > _LARGEST_SHIFT or min(g.std() for g in grey) < _FLAT:
        return False
    return bool(np.corrcoef(*grey)[0, 1] >= correlation)


def _are_flat(pairs: Sequence[tuple[RGB, RGB]]) -> bool:
    """Whether patches have the same colours, and too little structure to be compared."""
    finer, coarser = (np.concatenate(side) for side in zip(*pairs, strict=True))
    spread = finer.mean(1).std(), coarser.mean(1).std()
    same_colours = np.abs(finer.mean(0) - coarser.mean(0)).max() <= _LARGEST_SHIFT
    return bool(same_colours and min(spread) < _FLAT and max(spread) < 3 * _FLAT)


def _reduced(pixels: RGB, shape: tuple[int, int]) -> RGB:
    """Return area means of ``(h, w, 3)`` pixels, of this height and width."""
    taps = (make_taps(0, to, size / to, size) for to, size in zip(shape, pixels.shape, strict=False))
    return resample(np.ascontiguousarray(pixels.transpose(2, 0, 1)), *taps).transpose(1, 2, 0)


def _patch(finer: SourceLevel, coarser: SourceLevel, ratio: tuple[float, float], position: tuple[float, float]) -> Box:
    """Return a box of the coarser level around a place; inside one tile of both levels, if tiles are large enough.

    Decoding tiles takes most of the time: a patch over four tiles takes four times as long.
    """
    largest = max(_PATCH_PX[0], min(_PATCH_PX[1], int(_FINER_PX / max(ratio))))
    spans = []
    sizes = (coarser.height_px, coarser.width_px)
    # Tile sides in pixels of the coarser level: the smaller one of both levels.
    steps = [
        min(own_tile_px, finer_tile_px / factor)
        for own_tile_px, finer_tile_px, factor in zip(coarser.tile_px, finer.tile_px, ratio, strict=True)
    ]
    for at, size, step in zip(position, sizes, steps, strict=True):
        centre, side = min(size - 1, int(at * size)), largest
        start = centre - side // 2
        # The tile around the centre begins at `first` and has `room` whole pixels.
        first = math.ceil(centre // step * step)
        room = math.floor((centre // step + 1) * step) - first
        if room >= _PATCH_PX[0]:
            side = min(side, room)
            start = max(first, min(centre - side // 2, first + room - side))
        start = max(0, min(start, size - side))
        spans.append((start, min(size, start + side)))
    return Box(*spans[0], *spans[1])


def _grey(pixels: RGB) -> npt.NDArray[np.float32]:
    grey: npt.NDArray[np.float32] = pixels.mean(2, dtype=np.float32)
    return grey
