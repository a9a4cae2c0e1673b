"""Evaluation of slides by models with an encoder of tiles, whose tiles ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from data.samples.dataset import SlideDataset
from data.samples.view import View
from data.store.slide_store import SlideStore
from data.tiles.bags import tissue_seen
from data.tiles.case_bags import JoinedTiles
from data.tiles.reader import StoreTiles
from data.tiles.tiling import Tiling
from data.tiles.tissue_tiles import TissueTiles, tissue_tiles
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.tiles.engine import TilesEngine
from hyfi_core.tiles.explanation import TileExplanation
from hyfi_core.tiles.model import TileModel
from hyfi_core.tiles.parallelize_tiles import parallelize_tiles
from hyfi_core.tiles.source import TileSource
from pathology.errors import SlideError
from pathology.predict.ensemble import LateErrors, Sight, on_every_rank
from pathology.predict.heatmap import Heatmap
from pathology.predict.members import InputSpec, Member
from pathology.predict.options import PredictOptions
from pathology.predict.tiles.tile_heatmap import TileValues, place_tiles


@dataclass(frozen=True)
class _OpenCase:
    """The case whose slides are predicted one after the other.

    Attributes:
        paths: Paths of its slides.
        bags: (slide, its tiles) of each.
        explained: Index of a member -> its explanation of all tiles of the case.
    """

    paths: tuple[Path, ...]
    bags: Sequence[tuple[SlideStore, TissueTiles]]
    explained: dict[int, TileExplanation] = field(default_factory=dict)


class TileEnsemble:
    """The members' engines on all ranks of a group. Every method is collective.

    Attributes:
        chunk: Tiles that are encoded at once.
        needs_tissue: Whether a slide without tissue is not predicted.

    Args:
        members: Models with an encoder of tiles.
        spec: Common to all members.
        comm: The ranks that share the tiles of each slide.
        options: Their memory limit.

    Raises:
        RequestError: A model cannot be computed tile by tile.
    """

    chunk: int | Literal["auto"] = "auto"
    needs_tissue = True

    def __init__(self, members: Sequence[Member], spec: InputSpec, comm: Communicator, options: PredictOptions) -> None:
        self._comm, self._members = comm, tuple(members)
        self._engines = [_engine(member, comm, options, self.chunk) for member in members]
        size, stride, least = spec.tiles or (1, 1, 0.0)
        self._tiling, self._stain = Tiling(size, stride, spec.mpp, least), spec.stain
        self._open = options.opened
        self._case: _OpenCase | None = None

    def look(self, dataset: SlideDataset, all_tissue: bool) -> Sight:
        """Return the tissue tiles of the dataset's slide.

        Raises:
            SlideError: The slide cannot be read, or no tile has enough tissue.
        """
        slide = on_every_rank(self._comm, lambda: stored_slide(dataset))
        mask, mask_mpp = on_every_rank(self._comm, slide.tissue)
        if not mask.any() and self.needs_tissue:
            return Sight(views=(), coverage=0.0, flags=("no_tissue",), level=0)
        tiles = on_every_rank(self._comm, lambda: self.tiles_of(slide))
        coverage, tissue_px = tissue_seen(mask, mask_mpp, tiles)
        # Models of tiles have one view, of the size of a tile and without pieces.
        view = View((tiles.size_px, tiles.size_px), pieces=(), coverage=coverage, tissue_px=tissue_px, flags=())
        return Sight((view,), coverage, flags=(), level=tiles.plane.level, tiles=tiles)

    def tiles_of(self, slide: SlideStore) -> TissueTiles:
        """Return the tiles of a slide.

        Raises:
            RequestError: None has enough tissue.
        """
        return tissue_tiles(slide, self._tiling)

    def source_of(self, slide: SlideStore, tiles: TissueTiles) -> tuple[TileSource, torch.Tensor]:
        """Return the tiles for the encoder, and a substitute ``(1, …)`` for one that cannot be read."""
        white = torch.full((1, 3, tiles.size_px, tiles.size_px), 255, dtype=torch.uint8)
        colours = None if self._stain is None else self._stain.of_slide(slide, slide.slide_id)
        return StoreTiles(slide, tiles, colours=colours), white

    def heatmaps(self, dataset: SlideDataset, sight: Sight) -> list[Heatmap]:
        """Return each member's heatmap of the slide, with its logits.

        Raises:
            SlideError: The pixels cannot be read, or a member's output is not finite.
        """
        assert sight.tiles is not None
        slide, tiles = stored_slide(dataset), sight.tiles
        if len(sight.case_slides) < 2:
            return [
                place_explanation(member, tiles, self._explained(engine, [(slide, tiles)]))
                for member, engine in zip(self._members, self._engines, strict=True)
            ]
        return [self._of_case(k, slide, tiles, sight.case_slides) for k in range(len(self._members))]

    def _of_case(self, member: int, slide: SlideStore, tiles: TissueTiles, paths: tuple[Path, ...]) -> Heatmap:
        """Return a member's heatmap of one slide of a case, all of whose slides are one bag."""
        # Slides come case by case, so keep the last case: its tiles are encoded once for all of its slides.
        if self._case is None or self._case.paths != paths:
            slides = on_every_rank(self._comm, lambda: [self._open(path) for path in paths])
            bags_of_case = on_every_rank(self._comm, lambda: [(opened, self.tiles_of(opened)) for opened in slides])
            self._case = _OpenCase(paths, bags_of_case)
        bags, explained = self._case.bags, self._case.explained
        if member not in explained:
            explained[member] = self._explained(self._engines[member], bags)
        counts = [len(of_slide) for _, of_slide in bags]
        index = next(k for k, (slide_of_case, _) in enumerate(bags) if slide_of_case.slide_id == slide.slide_id)
        first = sum(counts[:index])
        return place_explanation(self._members[member], tiles, explained[member], slice(first, first + counts[index]))

    def _explained(self, engine: TilesEngine, bags: Sequence[tuple[SlideStore, TissueTiles]]) -> TileExplanation:
        """Return the explanation of the tiles of some slides as one bag, one slide after the other.

        Raises:
            SlideError: Their pixels cannot be read, or the output is not finite.
        """
        # On several ranks, errors of reading wait until the collective call below has ended.
        late = LateErrors(shared=self._comm.size > 1)
        parts = [
            _CheckedTiles(*on_every_rank(self._comm, partial(self.source_of, slide, tiles)), late, slide.slide_id)
            for slide, tiles in bags
        ]
        explanation = engine.explain(parts[0] if len(parts) == 1 else JoinedTiles("the case", parts))
        # After the collective call: if a rank raised an error earlier, the others would wait for it.
        on_every_rank(self._comm, late.raise_error)
        if not bool(torch.isfinite(explanation.logits).all()):
            raise SlideError(f"the network's output is not finite: {explanation.logits.tolist()}")
        return explanation


def place_explanation(
    member: Member, tiles: TissueTiles, explanation: TileExplanation, own: slice = slice(None)
) -> Heatmap:
    """Return the heatmap of a slide's tiles.

    Args:
        member: The model.
        tiles: The slide's tiles.
        explanation: The member's explanation of all tiles of the bag.
        own: The slide's tiles among those of the bag; contributions of the other tiles count as bias.
    """
    readout = member.readout
    # The score of a tile is that of a slide with this tile alone. Readouts take maps (channels, h, w): give them a map
    # with a single column.
    scores = readout.position_scores(explanation.alone[own].T[:, :, None].float())[:, :, 0]
    attention = None if explanation.attention is None else explanation.attention.double().cpu().numpy()
    # `place_tiles` multiplies attention by the number of the slide's tiles, but 1 shall be the mean of the whole bag.
    values = TileValues(
        logits=explanation.logits.double().cpu().numpy(),
        scores=scores.cpu().numpy(),
        contributions=explanation.contributions[own].double().T.cpu().numpy(),
        attention=None if attention is None else attention[own] * (len(attention) / len(tiles)),
    )
    return place_tiles(tiles, values, readout.channels, readout.exclusive)


class _CheckedTiles:
    """Tiles of a slide, with a substitute for those that cannot be read: ranks wait for each other's vectors.

    Args:
        tiles: The tiles.
        instead: Substitute ``(1, …)`` for one that cannot be read.
        late: Keeps the error until all ranks have finished.
        name: The slide's name.
    """

    def __init__(self, tiles: TileSource, instead: torch.Tensor, late: LateErrors, name: str) -> None:
        self._tiles, self._instead, self._late = tiles, instead, late
        self.name, self.coords = name, tiles.coords

    def __len__(self) -> int:
        return len(self._tiles)

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """Return tiles, as their source has them."""
        # A view without memory of its own, of the right shape: other ranks wait for vectors of these tiles.
        instead = self._instead.expand(len(indices), -1, -1, -1)
        return self._late.read_or(lambda: instead, lambda: self._tiles.read(indices))


def _engine(member: Member, comm: Communicator, options: PredictOptions, chunk: int | Literal["auto"]) -> TilesEngine:
    model = member.model
    if not isinstance(model, TileModel):
        raise RequestError(f"{member.path}: its model is a {type(model).__name__}, not an encoder of tiles")
    plan = ParallelPlan(tiles=comm.size, memory_bytes=options.memory_bytes)
    return parallelize_tiles(model.encoder, model.aggregator, plan, comm, chunk=chunk)


def stored_slide(dataset: SlideDataset) -> SlideStore:
    """Return the dataset's only slide."""
    slide = dataset.slide(0)
    assert isinstance(slide, SlideStore), "tiles are read from stores"
    return slide
