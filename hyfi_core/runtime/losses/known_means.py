"""Losses of torch that are the mean of terms of single samples, so that they may be computed for each micro-batch.

Only what the documentation of torch guarantees counts; any other loss is computed over the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

LabelKind = Literal["classes", "elements"]
"""Labels are indices (or probabilities) of classes, or have the shape of the output."""
_FUNCTIONS: Mapping[Callable[..., Any], LabelKind] = {
    F.cross_entropy: "classes",
    F.nll_loss: "classes",
    F.mse_loss: "elements",
    F.l1_loss: "elements",
    F.smooth_l1_loss: "elements",
    F.huber_loss: "elements",
    F.binary_cross_entropy: "elements",
    F.binary_cross_entropy_with_logits: "elements",
    F.soft_margin_loss: "elements",
    F.poisson_nll_loss: "elements",
    F.kl_div: "elements",
    F.multilabel_soft_margin_loss: "elements",
}
_MODULES: Mapping[type[nn.Module], LabelKind] = {
    nn.CrossEntropyLoss: "classes",
    nn.NLLLoss: "classes",
    nn.MSELoss: "elements",
    nn.L1Loss: "elements",
    nn.SmoothL1Loss: "elements",
    nn.HuberLoss: "elements",
    nn.BCELoss: "elements",
    nn.BCEWithLogitsLoss: "elements",
    nn.SoftMarginLoss: "elements",
    nn.PoissonNLLLoss: "elements",
    nn.KLDivLoss: "elements",
    nn.MultiLabelSoftMarginLoss: "elements",
}
# Settings that change the term of each sample, not how terms are joined.
_HARMLESS = frozenset({"label_smoothing", "beta", "delta", "log_target", "log_input", "full", "eps"})
# The default of torch's losses.
_IGNORED = -100


@dataclass(frozen=True)
class KnownMean:
    """A loss that is the mean of terms of single samples, for labels that fit.

    Attributes:
        kind: the kind of labels that the loss takes.
        ignored: the index of a class whose samples do not count; if it occurs, the loss is not a mean over all samples.
        classes: number of classes or elements of a sample in ``trial_labels``.
    """

    kind: LabelKind
    ignored: int = _IGNORED
    classes: int = 3

    def trial_labels(self, samples: int) -> torch.Tensor:
        """Return labels for ``samples`` samples, none of an ignored class, on which the loss is such a mean."""
        if self.kind == "classes":
            counted = [index for index in range(self.classes) if index != self.ignored]
            return torch.tensor([counted[sample % len(counted)] for sample in range(samples)])
        return torch.linspace(0.1, 0.9, samples * self.classes, dtype=torch.float64).reshape(samples, -1)

    def fits(self, output: tuple[int, ...] | None, labels: torch.Tensor) -> bool:
        """Whether the loss is such a mean for this shape of output and these labels; first dims may differ.

        Other shapes would be broadcast, so that each sample is compared with all.
        """
        if output is None or len(output) < 2:
            return False
        shape = tuple(labels.shape)
        if self.by_index(output, labels):
            return shape[1:] == output[2:]
        return shape[1:] == output[1:]

    def by_index(self, output: tuple[int, ...], labels: torch.Tensor) -> bool:
        """Whether labels are indices of classes."""
        return self.kind == "classes" and labels.dim() == len(output) - 1

    def ignores(self, output: tuple[int, ...], labels: torch.Tensor) -> bool:
        """Whether some label is ignored; reads the labels."""
        return self.by_index(output, labels) and bool((labels == self.ignored).any())


def known_mean(loss: object) -> KnownMean | None:
    """Return what is known of a loss; None if it is not known to be a mean.

    Args:
        loss: a function of torch, a ``functools.partial`` of one, or a loss module of torch, not of a subclass.
    """
    if isinstance(loss, nn.Module):
        # Hooks and a replaced ``forward`` may compute anything.
        hooked = loss._forward_hooks or loss._forward_pre_hooks or "forward" in vars(loss)
        kind = None if hooked else _MODULES.get(type(loss))
        settings = {name: value for name, value in vars(loss).items() if not name.startswith("_")} | loss._buffers
        settings.pop("training", None)
        return None if kind is None else _mean_of(kind, settings)
    if isinstance(loss, functools.partial):
        is_bare = not loss.args and callable(loss.func)
        kind = _FUNCTIONS.get(loss.func) if is_bare else None
        return None if kind is None else _mean_of(kind, loss.keywords)
    # An object without a hash cannot be looked up.
    kind = _FUNCTIONS.get(loss) if callable(loss) and type(loss).__hash__ is not None else None
    return None if kind is None else _mean_of(kind, {})


def _mean_of(kind: LabelKind, settings: Mapping[str, Any]) -> KnownMean | None:
    """Return the mean that a loss of PyTorch computes with these settings; None if it is not a mean of samples."""
    classes = KnownMean.classes
    for name, value in settings.items():
        if name == "reduction":
            if value != "mean":
                return None
        elif name == "pos_weight":  # of each class, not of each sample
            if value is not None and (not isinstance(value, torch.Tensor) or value.dim() > 1):
                return None
            classes = classes if value is None or value.numel() == 1 else value.numel()
        elif name != "ignore_index" and name not in _HARMLESS and value is not None:
            return None
    return KnownMean(kind, int(settings.get("ignore_index", _IGNORED)), classes)
