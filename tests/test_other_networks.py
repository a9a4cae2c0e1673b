"""Networks from other people's packages, untouched, in small configurations: each equals one process.

Images carry an offset parameter, so that the gradient of every pixel is compared, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import OffsetImages, assert_equal_to_one_process

Shape = tuple[int, int, int, int]


def hugging_face(name: str, **options: Any) -> nn.Module:
    """Return ``transformers``' classifier of this name, made from a configuration: nothing is downloaded."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**options, num_labels=3)
    return getattr(transformers, f"{name}ForImageClassification")(config)


def resnet() -> nn.Module:
    return hugging_face("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="bottleneck")


def regnet() -> nn.Module:
    return hugging_face("RegNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], groups_width=4)


def mobilenet_v2(tf_padding: bool = False) -> nn.Module:
    sizes = {"depth_multiplier": 0.1, "min_depth": 4, "depth_divisible_by": 4, "finegrained_output": True}
    return hugging_face("MobileNetV2", **sizes, classifier_dropout_prob=0.0, tf_padding=tf_padding)


def mobilenet_v2_padded_as_in_tensorflow() -> nn.Module:
    return mobilenet_v2(tf_padding=True)


def convnext_v2() -> nn.Module:
    return hugging_face("ConvNextV2", hidden_sizes=[8, 8, 12, 16], depths=[1, 1, 2, 1])


def efficientnet() -> nn.Module:
    sizes = {"width_coefficient": 0.15, "depth_coefficient": 0.2, "hidden_dim": 192}
    return hugging_face("EfficientNet", **sizes, dropout_rate=0.0, drop_connect_rate=0.0)


def densenet() -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    return nets.DenseNet(2, 3, 3, init_features=8, growth_rate=4, block_config=(2, 2), bn_size=2)


def se_resnet() -> nn.Module:
    """Return a network of MONAI's blocks: its own networks of them have 25 million parameters and more."""
    blocks = pytest.importorskip("monai.networks.blocks")
    shortcut = nn.Sequential(nn.Conv2d(8, 16, 1, 2, bias=False), nn.BatchNorm2d(16))
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        blocks.SEResNetBottleneck(2, 8, 4, 1, 4, stride=2, downsample=shortcut),
        blocks.SEResNetBottleneck(2, 16, 4, 1, 4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def logits(out: Any) -> torch.Tensor:
    return out.logits


def only(out: Any) -> torch.Tensor:
    return out


def as_trained(model: nn.Module) -> None:
    model.train()


def with_frozen_norms(model: nn.Module) -> None:
    """Norms that use running statistics and are not trained, as transfer learning has it."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval().requires_grad_(False)


def in_evaluation_mode(model: nn.Module) -> None:
    model.eval()


Mode = Callable[[nn.Module], None]
NETWORKS = [
    (resnet, logits),
    (regnet, logits),
    (mobilenet_v2, logits),
    (mobilenet_v2_padded_as_in_tensorflow, logits),
    (convnext_v2, logits),
    (efficientnet, logits),
    (densenet, only),
    (se_resnet, only),
]


def assert_equal(make: Callable[[], nn.Module], output: Any, mode: Mode, shape: Shape, grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = make()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.running_var, 0.5, 1.5)  # as after some training, not as at birth
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)  # an EfficientNet is made with 0.02: gradients of 1e-34
    mode(model)
    whole = OffsetImages(model, shape)
    whole.training = model.training
    found = assert_equal_to_one_process(whole, shape, grid, classes=3, output=output)
    assert max(float(gradient.norm()) for gradient in found.gradients.values()) > 1e-3


@pytest.mark.parametrize(
    ("make", "output", "mode", "shape", "grid"),
    [
        (resnet, logits, in_evaluation_mode, (2, 3, 33, 37), (2, 1)),
        (regnet, logits, with_frozen_norms, (1, 3, 51, 66), (2, 2)),
        (convnext_v2, logits, as_trained, (2, 3, 70, 65), (1, 3)),
        (densenet, only, as_trained, (2, 3, 39, 45), (2, 2)),
    ],
)
def test_a_network_of_another_package(
    make: Callable[[], nn.Module], output: Any, mode: Mode, shape: Shape, grid: tuple[int, int]
) -> None:
    assert_equal(make, output, mode, shape, grid)


@pytest.mark.soak
@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (1, 3), (2, 2), (2, 3), (3, 3)])
@pytest.mark.parametrize("mode", [as_trained, with_frozen_norms, in_evaluation_mode])
@pytest.mark.parametrize(("make", "output"), NETWORKS)
def test_all_networks_in_all_modes_on_all_grids(
    make: Callable[[], nn.Module], output: Any, mode: Mode, grid: tuple[int, int]
) -> None:
    for shape in ((1, 3, 64, 96), (3, 3, 67, 81)):
        assert_equal(make, output, mode, shape, grid)
