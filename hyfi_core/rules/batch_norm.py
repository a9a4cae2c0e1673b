"""Rules for batch norm, in every form that capture produces.

training, a map on several ranks     one all-reduce of statistics, then the running statistics are updated
training, one rank or features       the native kernel on copies of the running statistics
no running statistics                the same without them
evaluation                           pointwise, no communication
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from hyfi_core.capture.program import Operator
from hyfi_core.ops.norms.batch_norm import BatchNorm, FusedBatchNorm
from hyfi_core.ops.norms.known_statistics import KnownStatistics
from hyfi_core.ops.norms.strides import batch_norm_for_all_strides
from hyfi_core.plan.box import Box
from hyfi_core.rules.accepted_maps import on_maps_or_flat
from hyfi_core.rules.builder import Builder, Rule
from hyfi_core.rules.calls import bound, emit_on_part, renamed
from hyfi_core.rules.instructions import KeepsStatistics, Split
from hyfi_core.rules.operator_facts import OperatorFacts

_LIVE_STATISTICS = ("aten._native_batch_norm_legit_functional.default", "aten._native_batch_norm_legit.no_stats")
"""Operators that normalise with statistics of the images at hand."""
_BATCH_NORM = batch_norm_for_all_strides(F.batch_norm)
_BATCH_NORM_WITH_STATISTICS = batch_norm_for_all_strides(torch._batch_norm_impl_index)


def batch_norm_training(builder: Builder, op: Operator) -> None:
    """Batch norm with statistics of the whole map; a single rank uses the native kernel."""
    x, weight, bias, running_mean, running_var, _, momentum, eps = op.args
    split = builder.same_pixels(op, x.name)
    part = builder.part(x.name, split)
    # The functional operator returns (result, saved mean, saved 1/σ, new running mean, new running variance).
    normalised, _, _, new_mean, new_var = (*op.outputs, None, None)[:5]
    affine = tuple(item.name if item is not None else None for item in (weight, bias))
    # Nothing to communicate: autograd differentiates the native kernel.
    if builder.grid == (1, 1) and builder.norm_replicas == 1:
        names = (part, running_mean.name, running_var.name, *affine)
        inputs = tuple(name for name in names if name is not None)
        native = NativeBatchNorm(weight is not None, bias is not None, momentum, eps)
        builder.compute(native, inputs, op.outputs, (split, *[None] * (len(op.outputs) - 1)), op)
        return
    count = _pixels(builder, x.name)
    batch_mean, batch_var = builder.fresh(running_mean.name), builder.fresh(running_var.name)
    outputs = (normalised, batch_mean, batch_var)
    _communicate(builder, _norm_over_ranks(builder, split, count, eps), (part, *affine), outputs, split)
    # PyTorch normalises by the biased variance and stores the unbiased one.
    unbias = count / max(count - 1, 1)
    for running, batch, output, factor in (
        (running_mean.name, batch_mean, new_mean, 1.0),
        (running_var.name, batch_var, new_var, unbias),
    ):
        if output is not None:
            builder.compute(_Running(momentum, factor), (running, batch), (output,))


def batch_norm_without_statistics(builder: Builder, op: Operator) -> None:
    """Batch norm with statistics of the whole map, without running statistics."""
    x, weight, bias, _, _, eps = op.args
    split = builder.same_pixels(op, x.name)
    part = builder.part(x.name, split)
    affine = tuple(item.name if item is not None else None for item in (weight, bias))
    if builder.grid == (1, 1) and builder.norm_replicas == 1:
        function, inputs = _without_statistics(op)
        names = tuple(part if name == x.name else name for name in inputs)
        builder.compute(function, names, op.outputs[:1], split)
        return
    norm = _norm_over_ranks(builder, split, _pixels(builder, x.name), eps)
    _communicate(builder, norm, (part, *affine), op.outputs[:1], split)


def batch_norm_evaluation(builder: Builder, op: Operator) -> None:
    """Batch norm with running statistics: pointwise, no communication."""
    x = op.args[0]
    split = builder.same_pixels(op, x.name)
    function, inputs = bound(renamed(op, {x.name: builder.part(x.name, split)}))
    builder.compute(lambda *tensors: function(*tensors)[0], inputs, op.outputs[:1], split, op)


def batch_norm(builder: Builder, op: Operator) -> None:
    """``batch_norm``, which capture leaves in the graph in evaluation mode."""
    # In training mode, capture has made it one of the functional forms.
    assert not op.args[5], op
    split = builder.same_pixels(op, op.args[0].name)
    emit_on_part(builder, op, split, split, op)


def batch_norm_of_features(builder: Builder, op: Operator) -> tuple[Callable[..., Any], tuple[str, ...]] | None:
    """Return (function, inputs) of a batch norm in training mode on replicated features; None for other operators.

    Raises:
        RequestError: its statistics would be computed over several replicas.
    """
    # With running statistics it is pointwise, like any operator on features.
    if op.text not in _LIVE_STATISTICS:
        return None
    if builder.norm_replicas > 1:
        builder.refuse(
            op,
            "normalises features that have no height and width, which plan.sync_batch_norm does not support",
            "sync_batch_norm=False",
        )
    if op.text == "aten._native_batch_norm_legit_functional.default":
        return _on_features(op)
    return _without_statistics(op)


def _on_features(op: Operator) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return (function, inputs) of batch norm in training mode that autograd can differentiate.

    It cannot differentiate the functional operator of the captured program.
    """
    x, weight, bias, running_mean, running_var, _, momentum, eps = op.args
    names = tuple(item.name for item in (x, running_mean, running_var, weight, bias) if item is not None)
    return NativeBatchNorm(weight is not None, bias is not None, momentum, eps), names


@dataclass(frozen=True)
class NormByMap(KeepsStatistics):
    """Batch norm with the statistics of its map, by the native kernel; takes map and, if they exist, weight and bias.

    Attributes:
        has_weight: whether there is a weight.
        has_bias: whether there is a bias.
        momentum: momentum of the running statistics, if any.
        eps: added to the variance.
    """

    has_weight: bool
    has_bias: bool
    momentum: float
    eps: float

    def __call__(self, x: Any, *affine: Any) -> Any:
        """Return the result."""
        return _BATCH_NORM(x, None, None, *self._affine(affine), True, self.momentum, self.eps)

    def measure(self, x: Any, *affine: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Return the result, and the mean and 1/σ by which it is normalised."""
        return self._measured(x, affine, None, None)

    def with_known(self, kept: Sequence[torch.Tensor], x: Any, *affine: Any) -> Any:
        """Return the result by known mean and 1/σ."""
        return KnownStatistics.apply(x, *self._affine(affine), *kept)  # type: ignore[no-untyped-call]

    def _measured(self, x: Any, affine: tuple[Any, ...], mean: Any, variance: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the result and (mean, 1/σ) of the map; running statistics are changed in place."""
        # What ``F.batch_norm`` calls, which does not return them.
        result, *statistics = _BATCH_NORM_WITH_STATISTICS(
            x, *self._affine(affine), mean, variance, True, self.momentum, self.eps, torch.backends.cudnn.enabled
        )[:3]
        return result, tuple(statistics)

    def _affine(self, affine: tuple[Any, ...]) -> tuple[Any, Any]:
        return affine[0] if self.has_weight else None, affine[self.has_weight] if self.has_bias else None


@dataclass(frozen=True)
class NativeBatchNorm(NormByMap):
    """The outputs of the functional batch norm, by the native kernel; running statistics are copied.

    Takes map, running mean, running variance and, if they exist, weight and bias.
    """

    def __call__(self, x: Any, mean: Any, variance: Any, *affine: Any) -> tuple[Any, ...]:
        """Return (result, None, None, running mean, running variance)."""
        # Copies: both may be outputs of an earlier call of the same norm; stacked, to start one kernel for both.
        with torch.no_grad():
            mean, variance = torch.stack((mean, variance)).unbind()
        result = _BATCH_NORM(x, mean, variance, *self._affine(affine), True, self.momentum, self.eps)
        return result, None, None, mean, variance

    def measure(self, x: Any, mean: Any, variance: Any, *affine: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Return the outputs, and the numbers to keep: mean and 1/σ of the map, and the new running statistics."""
        running = torch.stack((mean, variance))
        result, statistics = self._measured(x, affine, *running)
        return (result, None, None, *running), (*statistics, running)

    def with_known(self, kept: Sequence[torch.Tensor], x: Any, mean: Any, variance: Any, *affine: Any) -> Any:
        """Return the outputs by known mean and 1/σ, with the running statistics of the first run."""
        *statistics, running = kept
        return super().with_known(statistics, x, *affine), None, None, *running

    def traceable(self, x: Any, mean: Any, variance: Any, *affine: Any) -> tuple[Any, ...]:
        """Return the outputs by an operator that declares which inputs it changes, so that traces have them."""
        mean, variance = mean.detach().clone(), variance.detach().clone()
        norm = torch.ops.aten._native_batch_norm_legit.default
        result = norm(x, *self._affine(affine), mean, variance, True, self.momentum, self.eps)[0]
        return result, None, None, mean, variance


def _without_statistics(op: Operator) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return (function, inputs) of batch norm without running statistics; inputs are map, weight and bias."""
    x, weight, bias, _, _, eps = op.args
    names = tuple(item.name for item in (x, weight, bias) if item is not None)
    return NormByMap(weight is not None, bias is not None, 0.0, eps), names


def _pixels(builder: Builder, name: str) -> int:
    """Return how many values of each channel go into its statistics, over all synchronised replicas."""
    shape = builder.shape(name)
    # With shares, ``norm_replicas`` is a fraction: all samples / this replica's. The product is a whole number.
    return int(prod(shape) // shape[1] * builder.norm_replicas)


def _norm_over_ranks(builder: Builder, split: Split, count: int, eps: float) -> BatchNorm:
    """Return the operator for owned parts or, in a fused run, for computed boxes."""
    if split.boxes is None:
        return BatchNorm(count, eps)
    owned, computed = split.layout.parts[builder.rank], split.held[builder.rank]
    # A rank may own nothing and still compute a margin for its own later outputs.
    return FusedBatchNorm(count, eps, Box(0, 0, 0, 0) if owned.empty else owned.relative_to(computed))


def _communicate(
    builder: Builder,
    norm: BatchNorm,
    inputs: tuple[str | None, ...],
    outputs: tuple[str | None, ...],
    split: Split,
) -> None:
    """Emit the operator; its first output is a split map, the others are replicated statistics."""
    splits = (split, *[None] * (len(outputs) - 1))
    builder.communicate(norm, inputs, outputs, "reduce", splits, all_replicas=builder.norm_replicas > 1)


@dataclass(frozen=True)
class _Running(KeepsStatistics):
    """Updates a running statistic by that of a batch; a second run returns the result of the first.

    Attributes:
        momentum: momentum of the running statistic.
        factor: multiplies the batch's statistic, such as n / (n - 1) for an unbiased variance.
    """

    momentum: float
    factor: float

    def __call__(self, running: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Return the new running statistic."""
        return running * (1.0 - self.momentum) + batch.to(running.dtype) * (self.momentum * self.factor)

    def measure(self, *inputs: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Return the new running statistic twice: as the result, and to keep."""
        result = self(*inputs)
        return result, (result,)

    def with_known(self, kept: Sequence[torch.Tensor], *inputs: Any) -> Any:
        """Return the new running statistic of the first run."""
        return kept[0]


def has_live_statistics(op: Operator) -> bool:
    """Whether an operator is a batch norm that uses the statistics of its map: in training, and not frozen."""
    # The sixth argument is ``training``.
    return op.text in _LIVE_STATISTICS or (op.text == "aten.batch_norm.default" and bool(op.args[5]))


def _on_maps_and_tiles(rule: Rule) -> Rule:
    """Return a rule for maps and for tiles; statistics are those of the whole map, or of all tiles."""
    return on_maps_or_flat(rule, tiles=rule)


_NORM = OperatorFacts(_on_maps_and_tiles(batch_norm), "norm", gradient="new", fresh=True, cheap=True)

FACTS = {
    "batch_norm": _NORM,
    "_native_batch_norm_legit_functional": replace(_NORM, rule=_on_maps_and_tiles(batch_norm_training)),
    "_native_batch_norm_legit.no_stats": replace(
        _NORM, rule=_on_maps_and_tiles(batch_norm_without_statistics), cheap=False
    ),
    "_native_batch_norm_legit_no_training": replace(_NORM, rule=_on_maps_and_tiles(batch_norm_evaluation)),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), OperatorFacts(None, "norm")),
}
