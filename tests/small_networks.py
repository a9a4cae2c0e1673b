"""Small image classifiers of transformers and timm in float64, by the names under which the libraries register them.

What the installed versions register is taken, so that new versions bring their new networks along. Encoders without a
classifier get one: the mean over positions and a linear layer.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.errors import RequestError

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
    "DINOv3ConvNext": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "DonutSwin": WINDOWS,
    "EfficientNet": {"width_coefficient": 0.15, "depth_coefficient": 0.2, "hidden_dim": 192},
    "FocalNet": {"embed_dim": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "focal_levels": [2, 2], "patch_size": 4}
    | {"focal_windows": [3, 3]},
    "GLPN": PYRAMID,
    "HGNetV2": {"embedding_size": 8, "depths": [1, 1], "hidden_sizes": [8, 16], "stem_channels": [3, 8, 8]}
    | {"stage_in_channels": [8, 8], "stage_mid_channels": [8, 8], "stage_out_channels": [8, 16]}
    | {"stage_num_blocks": [1, 1], "stage_downsample": [False, True], "stage_downsample_strides": [2, 2]}
    | {"stage_light_block": [False, True], "stage_kernel_size": [3, 5], "stage_numb_of_layers": [2, 2]},
    "Hiera": {"embed_dim": 8, "image_size": [64, 64], "depths": [1, 1, 1, 1], "patch_size": [7, 7]},
    "ImageGPT": {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2},
    "Levit": {"hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1]}
    | {"key_dim": [8, 8, 8], "patch_size": 16},
    "MaskFormerSwin": WINDOWS,
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
    "RTDetrResNet": {"hidden_sizes": [16, 32], "depths": [1, 1]},
    "RegNet": {"hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    "ResNet": {"hidden_sizes": [8, 16], "depths": [1, 1]},
    "Segformer": PYRAMID,
    "Siglip": PAIR,
    "Siglip2": PAIR,
    "SwiftFormer": {"depths": [1, 1, 1, 1], "embed_dims": [8, 8, 16, 16], "mlp_ratio": 2},
    "Swin": WINDOWS,
    "Swin2SR": WINDOWS | {"image_size": 16, "patch_size": 1},
    "Swinv2": WINDOWS,
    "TextNet": {"stem_out_channels": 8, "hidden_sizes": [8, 8, 8, 16, 16], "image_size": [64, 64]},
    "VitPoseBackbone": {"image_size": [64, 64], "patch_size": [16, 16]},
}
"""What else a configuration needs to be small, by its name without ``Config``."""

LARGEST = 5_600_000
"""Parameters of a small network at most: what stays larger cannot be built small."""

TIMM = {
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
    "efficientnet_b0": {},
    "levit_128s": {"embed_dim": (16, 16, 16), "num_heads": (2, 2, 2), "depth": (1, 1, 1), "key_dim": 8, "img_size": 64},
    "mobilenetv3_small_050": {},
    "regnetx_002": {},
    "resnet10t": {"channels": (8, 8, 16, 16)},
    "resnetv2_18": {"channels": (8, 8, 16, 16)},
    "swin_tiny_patch4_window7_224": {"embed_dim": 8, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}
    | {"img_size": 64},
    "vit_tiny_patch16_224": {"embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": 64},
}
"""Networks of timm, and the options that make them small."""

Make = Callable[[], nn.Module]


class Pooled(nn.Module):
    """An encoder with the mean over its positions and a linear layer behind it.

    Args:
        encoder: what returns ``last_hidden_state`` ``(B, N, C)`` or ``(B, C, H, W)``, or ``feature_maps``.
        channels: C.
        positions: the dims over which the mean is taken.
    """

    def __init__(self, encoder: nn.Module, channels: int, positions: tuple[int, ...]) -> None:
        super().__init__()
        self.encoder, self.head, self._positions = encoder, nn.Linear(channels, 3), positions

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits ``(B, 3)``."""
        logits: torch.Tensor = self.head(features(self.encoder(images)).mean(self._positions))
        return logits


def features(out: Any) -> torch.Tensor:
    """Return the last features of an encoder's output."""
    values: torch.Tensor = out["feature_maps"][-1] if "feature_maps" in out else out["last_hidden_state"]
    return values


def shapes(name: str, kind: type[Any]) -> dict[str, Any]:
    """Return the options that make the configuration of this kind small."""
    usual = kind()
    common = {option: value for option, value in SMALL.items() if isinstance(getattr(usual, option, None), int)}
    return common | SHAPES.get(name, {})


def classifiers() -> dict[str, Make]:
    """Return the classifiers of transformers by the names of their configurations without ``Config``."""
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    return _of(auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, lambda model: model)


def encoders(images: torch.Tensor) -> dict[str, Make]:
    """Return the other vision networks of transformers that take images alone, each with a head; by name."""
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")

    def pooled(encoder: nn.Module) -> nn.Module:
        encoder.double().eval()
        with torch.no_grad():
            out = features(copy.deepcopy(encoder)(images))
        if len(out) != len(images):
            raise ValueError("all images become one sequence")
        return Pooled(encoder, out.shape[-1 if out.dim() == 3 else 1], (1,) if out.dim() == 3 else (2, 3))

    usual = _of(auto.MODEL_MAPPING, pooled, lambda name: "Vision" in name)
    makes = _of(auto.MODEL_FOR_BACKBONE_MAPPING, pooled) | usual | _of(auto.MODEL_FOR_IMAGE_MAPPING, pooled)
    return {name: make for name, make in sorted(makes.items()) if name not in classifiers()}


def of_timm() -> dict[str, Make]:
    """Return the networks of ``TIMM`` by name."""
    timm = pytest.importorskip("timm", exc_type=ImportError)

    def make(name: str) -> nn.Module:
        model: nn.Module = timm.create_model(name, num_classes=3, **TIMM[name])
        return model

    return {f"timm {name}": lambda name=name: make(name) for name in TIMM}


def _of(mapping: Any, finish: Callable[[nn.Module], nn.Module], takes: Any = lambda name: True) -> dict[str, Make]:
    def make(name: str, kind: Any) -> nn.Module:
        classes: Any = mapping[kind]
        build: Any = classes[0] if isinstance(classes, tuple) else classes
        config = kind(**shapes(name, kind))
        with torch.device("meta"):  # the size first: some defaults have billions of parameters
            check_size(build(config))
        return finish(build(config))

    kinds = {kind.__name__.removesuffix("Config"): kind for kind in mapping}
    return {name: lambda name=name, kind=kind: make(name, kind) for name, kind in sorted(kinds.items()) if takes(name)}


def check_size(model: nn.Module) -> None:
    """Refuse a network that is not small.

    Raises:
        ValueError: it is not.
    """
    size = sum(p.numel() for p in model.parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters")


def build(make: Make, images: torch.Tensor) -> nn.Module:
    """Return a small classifier in float64 that draws no random numbers.

    Raises:
        ValueError: its smallest configuration is large, or it does not take ``images``.
    """
    torch.manual_seed(0)
    try:
        model = make().double()
        check_size(model)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):  # as after some training: at birth outputs vanish
                if module.running_var is not None and module.running_mean is not None:
                    nn.init.uniform_(module.running_var, 0.5, 1.5)
                    nn.init.uniform_(module.running_mean, -0.5, 0.5)
                nn.init.uniform_(module.weight, 0.5, 1.5)
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for rate in ("drop_prob", "attention_dropout", "dropout", "drop_rate"):
                if isinstance(getattr(module, rate, None), float):
                    setattr(module, rate, 0.0)
        with torch.no_grad():
            copy.deepcopy(model)(images)
    except Exception as error:
        raise ValueError(" ".join(f"{type(error).__name__}: {error}".split())) from error
    return model.train()


def rounds_to_float32(model: nn.Module, images: torch.Tensor) -> bool:
    """Whether the captured program of a network in float64 computes in float32, as some norms and softmaxes do."""
    batch, channels, height, width = images.shape
    try:
        programs = [capture(one, (batch, channels, height, width), images.dtype) for one in (model, eval_of(model))]
    except RequestError:  # which any plan says, too
        return False
    return any(value.dtype == torch.float32 for program in programs for value in program.values.values())


def eval_of(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode."""
    return copy.deepcopy(model).eval()


class _Wide(types.ModuleType):
    """``torch``, whose float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, "float64" if name == "float32" else name)


@contextlib.contextmanager
def in_float64_throughout(model: nn.Module) -> Iterator[None]:
    """Context in which the code of the model's modules finds float64 where it asks for ``torch.float32``."""
    names = {type(module).__module__ for module in model.modules()}
    sources = [sys.modules[name] for name in names if not name.startswith(("torch.", "tests."))]
    with pytest.MonkeyPatch.context() as patch:
        for source in sources:
            if vars(source).get("torch") is torch:
                patch.setattr(source, "torch", _Wide("torch"))
        yield
