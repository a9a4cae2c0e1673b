"""Every classifier of images that ``transformers`` builds from a small configuration: exact, or refused by name.

The walk takes what the installed version registers, so that a new version brings its new networks along. ``make soak``
prints its table (``pytest -s``): per network and plan whether it is exact, refused and by which operator, or wrong.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError

PLANS = {
    "cells": ParallelPlan(((1, 1),), cells=(2, 2)),
    "2x2": ParallelPlan(((2, 2),)),
    "1x2": ParallelPlan(((1, 2),)),
    "two stages": ParallelPlan(((1, 1), (1, 1))),
}
LIMIT_S = 600.0
"""What one network may take on one plan before it counts as hanging: many times what any takes."""

EXACT = 30
"""Pairs of network and plan that are exact at least."""

LARGEST = 3_000_000
"""Parameters of a small configuration at most: what stays larger cannot be built small."""

SMALL = {
    "num_labels": 3,
    "image_size": 64,
    "patch_size": 16,
    "hidden_size": 16,
    "embedding_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
"""Set where a configuration has an integer of this name."""

VISION = SMALL | {"projection_dim": 16}
TEXT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WINDOWS = {"image_size": 64, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4}
PYRAMID = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]}
PYRAMID |= {"mlp_ratios": [2, 2, 2, 2]}
PAIR: dict[str, Any] = {"vision_config": VISION, "text_config": TEXT}
SHAPES: dict[str, dict[str, Any]] = {
    "Bit": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 4},
    "CLIP": PAIR,
    "ConvNext": {"num_hidden_layers": 2, "hidden_sizes": [8, 12], "depths": [1, 1], "patch_size": 4},
    "ConvNextV2": {"num_hidden_layers": 2, "hidden_sizes": [8, 12], "depths": [1, 1], "patch_size": 4},
    "Cvt": {"embed_dim": [8, 8, 12], "num_heads": [1, 2, 3], "depth": [1, 2, 3]},
    "DonutSwin": WINDOWS,
    "EfficientNet": {"width_coefficient": 0.15, "depth_coefficient": 0.2, "hidden_dim": 192},
    "FocalNet": {"embed_dim": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "focal_levels": [2, 2], "patch_size": 4}
    | {"focal_windows": [3, 3]},
    "HGNetV2": {"embedding_size": 8, "depths": [1, 1], "hidden_sizes": [8, 16], "stem_channels": [3, 8, 8]}
    | {"stage_in_channels": [8, 8], "stage_mid_channels": [8, 8], "stage_out_channels": [8, 16]}
    | {"stage_num_blocks": [1, 1], "stage_downsample": [False, True], "stage_downsample_strides": [2, 2]}
    | {"stage_light_block": [False, True], "stage_kernel_size": [3, 5], "stage_numb_of_layers": [2, 2]},
    "Hiera": {"embed_dim": 8, "image_size": [64, 64], "depths": [1, 1, 1, 1], "patch_size": [7, 7]},
    "ImageGPT": {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2},
    "Levit": {"hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1]}
    | {"key_dim": [8, 8, 8], "patch_size": 16},
    "MetaClip2": PAIR,
    "MobileNetV1": {"depth_multiplier": 0.25},
    "MobileNetV2": {"depth_multiplier": 0.1, "min_depth": 4, "depth_divisible_by": 4},
    "MobileViT": {"hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 16, 16, 16], "patch_size": 2},
    "MobileViTV2": {"width_multiplier": 0.25, "n_attn_blocks": [1, 1, 1], "base_attn_unit_dims": [64, 64, 64]}
    | {"patch_size": 2},
    "Perceiver": {"num_latents": 8, "d_latents": 16, "num_self_attends_per_block": 1, "num_blocks": 1}
    | {"num_self_attention_heads": 2, "num_cross_attention_heads": 1},
    "PoolFormer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "Pvt": PYRAMID,
    "PvtV2": PYRAMID | {"image_size": [64, 64]},
    "RegNet": {"hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    "ResNet": {"hidden_sizes": [8, 16], "depths": [1, 1]},
    "Segformer": PYRAMID,
    "Siglip": PAIR,
    "Siglip2": PAIR,
    "SwiftFormer": {"depths": [1, 1, 1, 1], "embed_dims": [8, 8, 16, 16], "mlp_ratio": 2},
    "Swin": WINDOWS,
    "Swinv2": WINDOWS,
    "TextNet": {"stem_out_channels": 8, "hidden_sizes": [8, 8, 8, 16, 16], "image_size": [64, 64]},
}
"""What else a configuration needs to be small, by its name without ``Config``."""


def shapes(name: str, kind: type[Any]) -> dict[str, Any]:
    """Return the options that make the configuration of this kind small."""
    usual = kind()
    common = {option: value for option, value in SMALL.items() if isinstance(getattr(usual, option, None), int)}
    return common | SHAPES.get(name, {})


def registered() -> dict[str, type[Any]]:
    """Return the configurations that have a classifier of images, by their names without ``Config``."""
    pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING

    kinds = {kind.__name__.removesuffix("Config"): kind for kind in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING}
    return dict(sorted(kinds.items()))


def build(name: str, kind: type[Any], images: torch.Tensor) -> nn.Module:
    """Return a small classifier in float64 that draws no random numbers.

    Raises:
        ValueError: its smallest configuration is large, or it does not take ``images``.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING

    torch.manual_seed(0)
    try:
        classes: Any = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING[kind]
        make: Any = classes[0] if isinstance(classes, tuple) else classes
        with torch.device("meta"):  # the size first: some defaults have billions of parameters
            size = sum(p.numel() for p in make(kind(**shapes(name, kind))).parameters())
        if size > LARGEST:
            raise ValueError(f"{size:,} parameters")
        model: nn.Module = make(kind(**shapes(name, kind))).double()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):  # as after some training: at birth outputs vanish
                if module.running_var is not None and module.running_mean is not None:
                    nn.init.uniform_(module.running_var, 0.5, 1.5)
                    nn.init.uniform_(module.running_mean, -0.5, 0.5)
                nn.init.uniform_(module.weight, 0.5, 1.5)
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for rate in ("drop_prob", "attention_dropout", "dropout"):
                if isinstance(getattr(module, rate, None), float):
                    setattr(module, rate, 0.0)
        with torch.no_grad():
            copy.deepcopy(model)(images)
    except Exception as error:
        raise ValueError(" ".join(f"{type(error).__name__}: {error}".split())) from error
    return model.train()


@dataclass(frozen=True)
class Step:
    """One step and one prediction.

    Attributes:
        loss: of the step.
        gradients: by parameter.
        outputs: those of evaluation.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    outputs: torch.Tensor

    def error(self, other: Step) -> float:
        """Return the largest relative difference to ``other``, the true step.

        A gradient that is zero but for rounding is compared with a thousandth of the norm of all.
        """
        norm = math.sqrt(sum(float(g.norm()) ** 2 for g in other.gradients.values()))
        errors = [abs(self.loss - other.loss) / abs(other.loss)]
        errors.append(float((self.outputs - other.outputs).norm()) / max(float(other.outputs.norm()), 1e-30))
        for name, true in other.gradients.items():
            errors.append(float((self.gradients[name] - true).norm()) / max(float(true.norm()), 1e-3 * norm))
        return max(math.inf if math.isnan(error) else error for error in errors)


def logits(out: Any) -> torch.Tensor:
    values: torch.Tensor = out.logits
    return values


def by_one_process(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Step:
    model = copy.deepcopy(model)
    loss = F.cross_entropy(model(images).logits, labels)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        return Step(float(loss), gradients, model.eval()(images).logits)


def by_plan(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, plan: ParallelPlan) -> Step:
    copies = [copy.deepcopy(model) for _ in range(plan.ranks)]

    def body(comm: Communicator) -> Step:
        batch, channels, height, width = images.shape
        shape = (batch, channels, height, width)
        engine = hyfi_core.parallelize(copies[comm.rank], shape, plan, comm, output=logits, verify=False)
        loss = engine.accumulate(images, labels)
        return Step(float(loss), engine.gather_gradients() or {}, engine.predict(images))

    return run_ranks(plan.ranks, body, LIMIT_S)[0]


def verdicts(names: list[str] | None = None, plans: list[str] | None = None) -> Iterator[tuple[str, str, str, str]]:
    """Yield network, plan (none for what cannot be built small), verdict and reason, of all networks and plans."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64, generator=generator)
    labels = torch.tensor([0, 1])
    kinds = registered()
    for name in names or kinds:
        try:
            model = build(name, kinds[name], images)
        except ValueError as error:
            yield name, "", "not built", str(error)
            continue
        true = by_one_process(model, images, labels)
        for plan in plans or PLANS:
            try:
                difference = by_plan(model, images, labels, PLANS[plan]).error(true)
            except RequestError as refusal:
                yield name, plan, "refused", " ".join(str(refusal).split())
            except Exception as failure:  # dead-locked, out of time, or a fault: all are wrong
                yield name, plan, "wrong", " ".join(f"{type(failure).__name__}: {failure}".split())
            else:
                yield name, plan, "exact" if difference < 1e-9 else "wrong", f"{difference:.0e}"


@pytest.mark.soak
@pytest.mark.timeout(24 * 3600)
def test_every_classifier_is_exact_or_refused_by_name() -> None:
    seen = []
    for name, plan, verdict, reason in verdicts():
        print(f"{name:20} {plan:10} {verdict:9} {reason[:200]}", flush=True)
        seen.append((name, plan, verdict, reason))
    print(Counter(verdict for _, _, verdict, _ in seen))
    assert [line for line in seen if line[2] == "wrong"] == []
    assert sum(verdict == "exact" for _, _, verdict, _ in seen) >= EXACT


@pytest.mark.parametrize(("name", "plan"), [("CLIP", "cells"), ("ViT", "2x2")])
def test_some_classifiers_are_exact(name: str, plan: str) -> None:
    assert [line[:3] for line in verdicts([name], [plan])] == [(name, plan, "exact")]
