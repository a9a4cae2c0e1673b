"""The keys of a run with bags: ``data.tiles`` with ``model.encoder``, or ``data.features``; and ``model.aggregator``.

Keys of whole images have no meaning in such a run; given ones are refused by name.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from workflows.config.section import Count, Positive, Section, Share, UserPath

if TYPE_CHECKING:
    from data.tiles.tiling import Tiling
    from workflows.config.ranks import RolesConfig


def _lora(value: Any) -> Any:
    """Return ``lora:R`` for ``{lora: {rank: R}}``, and any other value as it is."""
    if isinstance(value, dict) and set(value) == {"lora"}:
        inside = value["lora"]
        if isinstance(inside, dict) and set(inside) == {"rank"}:
            return f"lora:{inside['rank']}"
    return value


_CELLS_OF_SIDE = 8
"""Most cells of a heatmap along the side of a tile."""


class TilesConfig(Section):
    """How slides are divided into tiles."""

    size_px: Positive = Field(224, description="a whole number ≥ 1: height and width of a tile, in pixels")
    stride_px: Positive | None = Field(
        None, description="a whole number ≥ 1: distance between neighbouring tiles, in pixels; default: size_px"
    )
    mpp: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="a number > 0: microns per pixel of tiles; default: those of the store's finest level",
    )
    min_tissue: Share = Field(
        0.25, description="a number from 0 to 1: share of a tile that must be tissue; tiles with less are left out"
    )
    most: Positive | None = Field(
        None,
        description="a whole number ≥ 1: tiles of a slide in a step, drawn anew in each epoch; default: all tiles. "
        "Validation and prediction always use all tiles",
    )

    @model_validator(mode="after")
    def _has_a_heatmap(self) -> TilesConfig:
        """Check that the cells of heatmaps are not far smaller than tiles: their side is gcd(size, stride)."""
        stride, sides = self.stride_px or self.size_px, range(1, self.size_px + 1)
        if self.size_px > _CELLS_OF_SIDE * gcd(self.size_px, stride):
            # The smallest allowed side that divides the size; the message offers a stride that is a multiple of it.
            cell = next(side for side in sides if self.size_px % side == 0 and self.size_px <= _CELLS_OF_SIDE * side)
            raise ValueError(
                f"stride_px: {stride} and size_px {self.size_px} have only {gcd(self.size_px, stride)} as common "
                "divisor, which would be the side of a heatmap's cells in pixels; use "
                f"{max(1, round(stride / cell)) * cell}, for example"
            )
        return self

    def build(self, mpp: float | None = None) -> Tiling:
        """Return the tiling; ``mpp``: microns per pixel if this section gives none."""
        from data.tiles.tiling import Tiling

        return Tiling(self.size_px, self.stride_px, self.mpp if self.mpp is not None else mpp, self.min_tissue)


class EncoderConfig(Section):
    """The encoder of tiles."""

    name: str = Field(
        min_length=1,
        description="timm:NAME, transformers:FOLDER or package.module:factory: a network of timm, a model saved by "
        "transformers, or a function of your own that returns a module, (n, 3, T, T) to (n, D)",
    )
    weights: UserPath | None = Field(
        None,
        description="a .safetensors or .pth file: weights of the encoder; nothing is downloaded; default: those of its "
        "folder or factory; of timm:NAME they are random",
    )
    train: Annotated[str, Field(pattern=r"^(all|none|norms|last:[1-9]\d*|lora:[1-9]\d*)$"), BeforeValidator(_lora)] = (
        Field(
            "all",
            description="all, none, norms, last:N or lora:R: which part of the encoder is trained: all of it, nothing, "
            "its normalisations, its last N blocks and what follows them, or updates of rank R of its matrices (LoRA)",
        )
    )
    batch_norm: Literal["frozen", "exact"] = Field(
        "frozen",
        description="frozen or exact: statistics of batch norm in training: its running ones, or those of all tiles "
        "of a slide, whose activations then stay in memory; validation and prediction use the running ones",
    )
    keep_bytes: Count = Field(
        2**31,
        description="a whole number ≥ 0: bytes of the encoder's vectors that each trainer keeps in memory between "
        "epochs, with train: none and without data.augment; 0: none",
    )
    shard: bool = Field(
        False,
        description="true or false: whether the ranks that share tiles (plan.tiles) also share weights, gradients and "
        "optimizer states of the encoder: each holds its part, and gathers block after block in every call. For "
        "encoders that do not fit a GPU",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the encoder's constructor: as in {drop_path_rate: 0.1}"
    )

    @model_validator(mode="after")
    def _can_be_divided(self) -> EncoderConfig:
        """Refuse to divide an encoder that is not trained, or whose norms wait for all tiles."""
        if self.shard and self.train == "none":
            raise ValueError(
                "shard: true with train: none: nothing of the encoder is trained; `hyfi features` computes its vectors"
            )
        if self.shard and self.batch_norm == "exact":
            raise ValueError("shard: true with batch_norm: exact, which waits for all tiles of a slide; use frozen")
        return self


class AggregatorConfig(Section):
    """The aggregator, from the features of all tiles to the slide's outputs."""

    name: str = Field(
        "gated_attention",
        min_length=1,
        description="mean, max, gated_attention, abmilx, clam_sb, dsmil, transmil, or package.module:factory: the "
        "aggregator; a function of your own is called with features and classes",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the aggregator: as in {hidden: 256, dropout: 0.25}"
    )


INSTEAD = {
    "data.size_px": "use data.tiles.size_px",
    "data.mpp": "use data.tiles.mpp",
    "data.view": "all tissue tiles are used",
    "data.align_px": "use data.tiles.stride_px",
    "data.min_coverage": "use data.tiles.min_tissue",
    "data.prefetch": "every trainer reads its own tiles, one chunk ahead; roles.loaders=1 adds a loader",
    "data.workers": "every trainer reads its own tiles; roles.loaders=1 adds a loader",
    "data.cache_bytes": "use data.node_cache_bytes",
    "model.name": "use model.encoder.name and model.aggregator.name",
    "model.weights": "use model.encoder.weights",
    "model.norm": "it belongs to the built-in networks for whole images",
    "model.pool": "use model.aggregator.name",
    "model.options": "use model.encoder.options and model.aggregator.options",
    **dict.fromkeys(
        (f"plan.{key}" for key in ("grids", "cuts", "schedule", "fused_halo", "interleave", "mirror", "branches")),
        "use plan.tiles, the ranks that share the tiles of a slide",
    ),
    "plan.microbatches": "use optimizer.accumulate; memory does not depend on the batch",
    "plan.sync_batch_norm": "use model.encoder.batch_norm",
    **dict.fromkeys(
        (f"plan.{key}" for key in ("recompute", "gather_bytes", "cells", "spill")),
        "an encoder is computed chunk by chunk within plan.memory_bytes",
    ),
    **dict.fromkeys(
        (f"roles.{key}" for key in ("design", "spare", "shares")),
        "spare ranks do not train; use them as roles.loaders or roles.validators, or add plan.replicas",
    ),
    "validation.policy": "trainers validate; roles.validators=1 adds a validator",
    **dict.fromkeys(
        (f"validation.{key}" for key in ("grids", "cells")),
        "the tiles of a slide are shared by as many ranks as in training, chunk by chunk",
    ),
    "run.compile": "encoders are not compiled",
    "run.compile_cache": "encoders are not compiled",
    "run.trace": "steps of tile encoders are not traced",
}
"""Keys that have no meaning with ``data.tiles``, and what to do instead."""

_COMPUTED = "features are computed already"
INSTEAD_OF_FEATURES = {
    **INSTEAD,
    **dict.fromkeys(("data.size_px", "data.mpp", "data.align_px", "data.min_coverage", "data.tiles"), _COMPUTED),
    **dict.fromkeys(("data.augment", "data.stain_normalisation", "data.stain_reference", "model.encoder"), _COMPUTED),
    **dict.fromkeys(("model.mean", "model.std"), _COMPUTED),
    "data.view": "all tiles of a file of features are used",
    "data.prefetch": "every trainer reads its own features; roles.loaders=1 adds a loader",
    "data.workers": "every trainer reads its own features; roles.loaders=1 adds a loader",
    "data.cache_bytes": "the system caches files that were read, as far as it has memory",
    "model.name": "use model.aggregator.name",
    "model.weights": "an aggregator begins with random weights",
    "model.options": "use model.aggregator.options",
}
"""Keys that have no meaning with ``data.features``, and what to do instead."""


def without_meaning(kind: str, roles: RolesConfig) -> dict[str, str]:
    """Return the keys that have no meaning in a run, and what to do instead.

    Args:
        kind: What the run trains with: ``images``, ``tiles`` or ``features``.
        roles: The roles of its ranks.
    """
    instead = {"images": {}, "tiles": INSTEAD, "features": INSTEAD_OF_FEATURES}[kind]
    # Keys of `instead` that mean something with these roles: of loaders and validators, which such runs may have.
    with_meaning = {"roles.design"} if roles.design != "offload_naive" else set()
    with_meaning |= {"data.prefetch", "data.workers"} if roles.loaders else set()
    with_meaning |= {"validation.policy"} if roles.validators else set()
    return {key: reason for key, reason in instead.items() if key not in with_meaning}
