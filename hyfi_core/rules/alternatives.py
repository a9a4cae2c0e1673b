"""What works in place of an operator that has no rule for maps that are split over ranks: one entry each."""

from __future__ import annotations

from collections.abc import Mapping

_CHANNELS = "torch.cat of slices of channels, as torch.cat([new, y[:, 2:]], 1)"
_RESIZED = "F.interpolate with mode='bilinear' and antialias=False, or mode='nearest'"
_FLIPPED = "images flipped or rolled before the model is given them"

ALTERNATIVES: Mapping[str, str] = {
    f"aten.{name}": alternative
    for name, alternative in {
        "_upsample_bilinear2d_aa.vec": _RESIZED,
        "amin.default": "-(-y).amax(dims)",
        "avg_pool3d.default": "a norm such as nn.GroupNorm(1, C) where this is a local response norm",
        "channel_shuffle.default": "y.view(B, groups, C // groups, H, W).transpose(1, 2).reshape(B, C, H, W)",
        "clamp.Tensor": "torch.maximum and torch.minimum",
        "copy.default": _CHANNELS,
        "cosine_similarity.default": "(F.normalize(a, dim=1) * F.normalize(b, dim=1)).sum(1)",
        "flip.default": _FLIPPED,
        "grid_sampler.default": _RESIZED,
        "im2col.default": "nn.Conv2d with the kernel and the stride that unfold has",
        "index.Tensor": _CHANNELS,
        "index_select.default": _CHANNELS,
        "linalg_matrix_norm.str_ord": "torch.linalg.vector_norm(y, dim=(2, 3)), which is the Frobenius norm",
        "max.default": "y.amax((2, 3)).amax()",
        "max_pool2d_with_indices.default": "F.max_pool2d with return_indices=False",
        "min.default": "-(-y).amax((2, 3)).amax()",
        "nan_to_num.default": "torch.where(y.isnan(), 0.0, y)",
        "repeat.default": "torch.cat([y] * n, 1)",
        "repeat_interleave.self_int": "torch.stack([y] * n, 2).flatten(1, 2)",
        "roll.default": _FLIPPED,
        "rrelu.default": "F.leaky_relu",
        "slice_scatter.default": _CHANNELS,
        "tile.default": "torch.cat([y] * n, 1)",
        "upsample_bicubic2d.vec": _RESIZED,
        "var_mean.correction": "y.var(dims) and y.mean(dims)",
        "var_mean.dim": "y.var(dims) and y.mean(dims)",
    }.items()
}
"""Text form of an operator -> what to write; ``y`` is the map, ``dims`` what the operator was given."""
