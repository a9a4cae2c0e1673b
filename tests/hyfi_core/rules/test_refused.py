"""Every refusal of a rule: reached by the smallest function of a map, and saying what is wrong and what would work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from hyfi_core.capture.program import Program
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.plan.layout import Layout
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.instructions import Split
from tests.harness import Answers, captured_once
from tests.hyfi_core.rules.test_accepted import NormOfFeatures

Tensor = torch.Tensor
SHAPE = (2, 3, 12, 12)  # a map of 6 x 6: turned, it has the same shape
attend = F.scaled_dot_product_attention


@dataclass(frozen=True)
class Refused:
    """A function of a map (2, 6, 6, 6), and what is said of it."""

    function: Callable[[Tensor], Tensor]
    operator: str
    problem: str
    instead: str


def flat(y: Tensor) -> Tensor:
    return y.flatten(2)


def positions(y: Tensor) -> Tensor:
    return flat(y).transpose(1, 2)


def heads(y: Tensor, count: int) -> Tensor:
    """Return (B, heads, positions, channels)."""
    return y.unflatten(1, (count, 6 // count)).flatten(3).transpose(2, 3)


def turned(y: Tensor) -> Tensor:
    return y.transpose(2, 3)


def tiles(y: Tensor) -> Tensor:
    return y.unflatten(2, (3, 2)).unflatten(4, (3, 2)).permute(0, 2, 4, 1, 3, 5).reshape(-1, 6, 2, 2)


def by_one_index(y: Tensor) -> Tensor:
    which = torch.tensor([0, 2])
    return flat(y)[:, which, which]


def with_mask(y: Tensor) -> Tensor:
    kept, mask = torch.ops.aten.native_dropout(y, 0.5, True)
    return kept * mask


def by_running(y: Tensor, live: bool) -> Tensor:
    # PyTorch's operator itself: of ``F.instance_norm``, capture traces arithmetic.
    return torch.instance_norm(y, None, None, torch.zeros(6), torch.ones(6), live, 0.1, 1e-5, False)


MIXED = "which mix rows or columns with something else"
EITHER = "either height or width"
CHANNELS = "entries of a dim other than height and width, such as channels (1)"
UNINDEXED = "torch.gather, F.embedding, or indices that are not computed from a map"
UNMASKED = "attention without a mask and without dropout"
TRACKED = "nn.InstanceNorm2d(track_running_stats=True), or nn.GroupNorm"

REFUSED: dict[str, Refused] = {
    "norm of rows": Refused(
        lambda y: F.layer_norm(y, (6,)),
        "layer_norm.default",
        "normalises dims [3] of a map whose height and width are dims (2, 3)",
        "normalisation of channels only",
    ),
    "RMS norm of space": Refused(
        lambda y: F.rms_norm(y, (6, 6)),
        "rms_norm.default",
        "normalises dims [2, 3] of a map whose height and width are dims (2, 3)",
        "normalisation of channels only",
    ),
    "cosine along rows": Refused(
        lambda y: F.cosine_similarity(y, y * 2, dim=2),
        "cosine_similarity.default",
        "is along dim 2, which is height or width",
        "a dim other than height and width, such as channels (1)",
    ),
    "split of positions": Refused(
        lambda y: flat(y).split(18, 2)[0],
        "split.Tensor",
        "splits a dim in which height and width are flattened",
        "a split of either height or width",
    ),
    "a table looked up by a map": Refused(
        lambda y: torch.arange(6.0)[y.argmax(1)], "index.Tensor", "indexes by a feature map", UNINDEXED
    ),
    "pixels written by number": Refused(
        lambda y: y.scatter(2, y.argmax(1, keepdim=True), 1.0),
        "scatter.value",
        "works along dim 2, which is height or width",
        CHANNELS,
    ),
    "maps of two sizes": Refused(
        lambda y: y.gather(1, y.argmax(1, keepdim=True).expand(-1, 2, -1, -1)[:, :, :1]),
        "gather.default",
        "takes maps of different sizes: (1, 6), (6, 6)",
        "maps of equal size in the same dims",
    ),
    "a map written into zeros": Refused(
        lambda y: torch.slice_scatter(torch.zeros(2, 6, 6, 6), y[:, :, :3], 2, 0, 3),
        "slice_scatter.default",
        "writes a slice of a map into a tensor that is not a map",
        "a map as destination, such as torch.zeros_like(y)",
    ),
    "written by a map of indices": Refused(
        lambda y: y.index_put((torch.tensor([[0]]), y.argmax(1)[:1]), torch.zeros(())),
        "index_put.default",
        "indexes by a feature map",
        UNINDEXED,
    ),
    "written with a turned map": Refused(
        lambda y: y.index_put((torch.tensor([0]),), turned(y)[:1]),
        "index_put.default",
        "writes a map whose height and width are dims (3, 2) where dims (2, 3) are expected",
        "maps of equal size in the same dims",
    ),
    "flat pixels overwritten": Refused(
        lambda y: torch.slice_scatter(flat(y), torch.zeros(2, 6, 4), 2, 0, 4),
        "slice_scatter.default",
        "overwrites pixels of a map whose height and width are flattened into one dim",
        EITHER,
    ),
    "pixels overwritten by a turned map": Refused(
        lambda y: torch.slice_scatter(y, turned(y)[:, :, :3], 2, 0, 3),
        "slice_scatter.default",
        "writes a map whose height and width are dims (3, 2) into one where they are (2, 3)",
        "maps in the same dims",
    ),
    "diagonal of space": Refused(
        lambda y: torch.diagonal(y, dim1=2, dim2=3),
        "diagonal.default",
        "takes the diagonal of dims [2, 3], which include height or width (dims (2, 3))",
        CHANNELS,
    ),
    "no rows": Refused(
        lambda y: y[:, :, 3:3], "slice.Tensor", "gives an empty slice of dim 2", "a slice that is not empty"
    ),
    "channels repeated at the border": Refused(
        lambda y: F.pad(y.unsqueeze(1), (0, 0, 0, 0, 1, 1), mode="replicate"),
        "pad.default",
        "pads dims [2] in mode 'replicate'",
        "padding of height and width (dims (3, 4))",
    ),
    "roll of positions": Refused(
        lambda y: torch.roll(flat(y), 1, 2), "roll.default", f"rolls dims [2], {MIXED}", EITHER
    ),
    "flip of positions": Refused(lambda y: flat(y).flip(2), "flip.default", f"flips dims [2], {MIXED}", EITHER),
    "norm by running statistics": Refused(
        lambda y: by_running(y, live=False), "instance_norm.default", "keeps running statistics", TRACKED
    ),
    "norm that keeps statistics": Refused(
        lambda y: by_running(y, live=True), "instance_norm.default", "keeps running statistics", TRACKED
    ),
    "norm of tiles by running statistics": Refused(
        lambda y: by_running(tiles(y), live=False),
        "instance_norm.default",
        "keeps running statistics",
        "nn.InstanceNorm2d without them, or nn.GroupNorm",
    ),
    "pooling in three dims": Refused(
        lambda y: F.avg_pool3d(y.unsqueeze(1), (1, 2, 2)),
        "avg_pool3d.default",
        "pools with kernel [1, 2, 2] over a map whose height and width are dims (3, 4)",
        "nn.LocalResponseNorm on (B, C, H, W)",
    ),
    "windows in the padding": Refused(
        lambda y: F.max_pool2d(y, 2, 1, 1, dilation=(7, 1)),
        "max_pool2d.default",
        "has windows whose taps are all in the padding",
        "a dilation of at most the map's size",
    ),
    "one index for two dims": Refused(
        by_one_index, "index.Tensor", "uses one tensor as index of two dims", "a tensor for each"
    ),
    "product of one pixel": Refused(
        lambda y: positions(y[:, :, :1, :1]) @ torch.ones(6, 4),
        "matmul.default",
        "takes a map of a single pixel",
        "a map of more than one pixel",
    ),
    "diagonal by einsum": Refused(
        lambda y: torch.einsum("bcii->bci", y),
        "einsum.default",
        "has the equation 'bcii->bci'",
        "one letter for each dim, none twice in one operand",
    ),
    "mask of dropout": Refused(
        with_mask, "native_dropout.default", "returns its mask", "dropout whose mask is used by nothing else"
    ),
    "norm of order 1/2": Refused(
        lambda y: torch.linalg.vector_norm(y, 0.5, (2, 3)),
        "linalg_vector_norm.default",
        "is a norm of order 0.5 over dims (2, 3)",
        "orders of 1 or more, or inf over height and width only",
    ),
    "variance of too few": Refused(
        lambda y: y.var((2, 3), correction=36),
        "var.correction",
        "has 36 value(s), too few for correction=36",
        "a smaller correction",
    ),
    "sum of channels with rows": Refused(
        lambda y: y.flatten(1, 2).sum(1), "sum.dim_IntList", f"is over dims (1,), {MIXED}", EITHER
    ),
    "slice of positions": Refused(
        lambda y: flat(y)[:, :, :4],
        "slice.Tensor",
        "slices a dim in which height and width are flattened",
        "a slice of either height or width",
    ),
    "every second tile": Refused(
        lambda y: tiles(y)[::2], "slice.Tensor", "takes tiles with a step other than 1, or none", "consecutive tiles"
    ),
    "no tiles": Refused(
        lambda y: tiles(y)[3:3], "slice.Tensor", "takes tiles with a step other than 1, or none", "consecutive tiles"
    ),
    "causal attention": Refused(
        lambda y: attend(positions(y), positions(y) * 2, positions(y), is_causal=True),
        "scaled_dot_product_attention.default",
        "has a mask or dropout",
        UNMASKED,
    ),
    "masked attention": Refused(
        lambda y: attend(positions(y), positions(y) * 2, positions(y), torch.ones(36, 36, dtype=torch.bool)),
        "scaled_dot_product_attention.default",
        "has a mask or dropout",
        UNMASKED,
    ),
    "attention with dropout": Refused(
        lambda y: attend(positions(y), positions(y) * 2, positions(y), dropout_p=0.5),
        "scaled_dot_product_attention.default",
        "has a mask or dropout",
        UNMASKED,
    ),
    "attention of channels": Refused(
        lambda y: attend(flat(y), flat(y) * 2, flat(y)),
        "scaled_dot_product_attention.default",
        "takes (2, 6, 36) whose height and width are dims (2, 2)",
        "positions in dim -2",
    ),
    "attention to a map of keys": Refused(
        lambda y: attend(torch.ones(2, 1, 6), positions(y), torch.ones(2, 36, 6)),
        "scaled_dot_product_attention.default",
        "has keys and values, and only one of them is a map",
        "maps for both, or for neither",
    ),
    "attention to positions of two maps": Refused(
        lambda y: attend(torch.ones(2, 1, 6), positions(y), positions(torch.cat([y[:, :, :3], y[:, :, 3:]], 3))),
        "scaled_dot_product_attention.default",
        "has keys and values of different maps",
        "maps of equal size for both",
    ),
    "attention of grouped queries": Refused(
        lambda y: attend(torch.ones(2, 4, 1, 3), *[heads(y, 2)] * 2, enable_gqa=True),
        "scaled_dot_product_attention.default",
        "has different numbers of heads for queries and keys",
        "the same number of heads, or one",
    ),
    "variance of complex numbers": Refused(
        lambda y: (y * 1j).var((2, 3)),
        "var.dim",
        "is of complex numbers",
        "the sum of the variances of real and imaginary part",
    ),
    "pooling of channels along positions": Refused(
        lambda y: F.avg_pool1d(positions(y), 3, 1, 1),
        "avg_pool1d.default",
        "works over dims (1, 2) of (2, 36, 6), not over positions",
        "(B, C, H · W)",
    ),
    "windows that reach more than a row behind": Refused(
        lambda y: F.conv1d(flat(y), torch.ones(4, 6, 14), None, 1, "same"),
        "conv1d.padding",
        "reaches 7 positions, more than a row",
        "stride 1 and padding that keeps the number of positions, a kernel that reaches at most one row, or F.conv2d "
        "or a pool of (B, C, H, W) before flattening",
    ),
    "windows of positions": Refused(
        lambda y: flat(y).unfold(2, 3, 1),
        "unfold.default",
        "takes windows along dim 2, which mixes rows or columns with something else",
        EITHER,
    ),
}


def program() -> Program:
    """Capture one model whose outputs are all of the functions."""
    return captured_once(Answers({name: each.function for name, each in REFUSED.items()}), SHAPE, torch.float32)


def said_of(name: str) -> str:
    """Return what is said when only this function is lowered for one of four ranks."""
    output = program().outputs[list(REFUSED).index(name)]
    with pytest.raises(RequestError) as caught:
        lower(program(), Target((2, 2), 0, gather_bytes=0), (output,))
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused_by_name(name: str) -> None:
    refused = REFUSED[name]
    # Gathering the map is offered behind it, except to what draws numbers.
    said = said_of(name).partition("; or plan.gather_bytes=")[0]
    assert said == f"aten.{refused.operator} {refused.problem}; what works: {refused.instead}"


def test_synchronised_statistics_of_features_are_refused() -> None:
    program = captured_once(NormOfFeatures().train(), SHAPE, torch.float32)
    lower(program, Target((2, 2), 0, gather_bytes=0))
    with pytest.raises(RequestError) as caught:
        lower(program, Target((2, 2), 0, gather_bytes=0, norm_replicas=2))
    assert str(caught.value) == (
        "aten._native_batch_norm_legit_functional.default in module 'norm' normalises features that have no height and "
        "width, which plan.sync_batch_norm does not support; what works: sync_batch_norm=False"
    )


def test_a_layout_of_other_pixels_is_not_that_of_a_map() -> None:
    """Rules compare maps before, and name the operator."""
    builder = Builder(program(), (2, 2), 0)
    with pytest.raises(RequestError) as caught:
        builder.part(program().image, Split(Layout.even(6, 6, (2, 2))))
    assert str(caught.value) == (
        "a map of (12, 12) pixels in dims (2, 3) is combined with one of (6, 6) pixels in dims (2, 3); what works: "
        "maps of equal size in the same dims"
    )
