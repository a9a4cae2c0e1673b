"""The models are the published ones: sizes, names, statistics, and every wrong argument refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.models.norm import FrozenBatchNorm2d
from hyfi_core.models.resnet import resnet10, resnet18, resnet34, resnet50, resnet_v1, resnet_v2


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("build", "parameters"),
    [
        (lambda: resnet18(), 11_689_512),
        (lambda: resnet34(), 21_797_672),
        (lambda: resnet50(), 25_557_032),
        (lambda: resnet_v1(20), 272_474),
        (lambda: resnet_v1(110), 1_730_714),
        (lambda: resnet_v2(110, block="basic"), 1_730_522),
        (lambda: resnet_v2(164), 1_703_258),
        (lambda: resnet_v2(1001), 10_327_706),
    ],
)
def test_parameter_counts_are_the_published_ones(build: Callable[[], nn.Module], parameters: int) -> None:
    with torch.device("meta"):
        assert count(build()) == parameters


def torchvision_names(blocks: tuple[int, ...], convs: int, first_projects: bool) -> set[str]:
    """Return the state dict's keys of torchvision's ResNets, spelled out from its documentation."""
    bn = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = {"conv1.weight", "fc.weight", "fc.bias"} | {f"bn1.{n}" for n in bn}
    for layer, depth in enumerate(blocks, start=1):
        for block in range(depth):
            at = f"layer{layer}.{block}"
            for conv in range(1, convs + 1):
                names |= {f"{at}.conv{conv}.weight"} | {f"{at}.bn{conv}.{n}" for n in bn}
            if block == 0 and (layer > 1 or first_projects):
                names |= {f"{at}.downsample.0.weight"} | {f"{at}.downsample.1.{n}" for n in bn}
    return names


@pytest.mark.parametrize("norm", ["train", "frozen"])
def test_names_are_those_of_torchvision(norm: str) -> None:
    with torch.device("meta"):
        assert set(resnet18(norm=norm).state_dict()) == torchvision_names((2, 2, 2, 2), 2, False)
        assert set(resnet34(norm=norm).state_dict()) == torchvision_names((3, 4, 6, 3), 2, False)
        fifty = resnet50(norm=norm).state_dict()
    assert set(fifty) == torchvision_names((3, 4, 6, 3), 3, True)
    assert fifty["layer2.0.conv2.weight"].shape == (128, 128, 3, 3)
    assert fifty["fc.weight"].shape == (1000, 2048)


def test_stride_of_a_bottleneck_sits_on_its_3x3() -> None:
    with torch.device("meta"):
        block = resnet50().layer2[0]
    assert (block.conv1.stride, block.conv2.stride) == ((1, 1), (2, 2))


@pytest.mark.parametrize("pool", ["avg", "max"])
@pytest.mark.parametrize("norm", ["train", "frozen", "group"])
@pytest.mark.parametrize(
    "build",
    [
        lambda **k: resnet10(3, width=8, **k),
        lambda **k: resnet50(3, width=4, **k),
        lambda **k: resnet_v1(8, 3, width=4, **k),
        lambda **k: resnet_v2(11, 3, width=4, **k),
        lambda **k: resnet_v2(8, 3, width=4, **k),
    ],
)
def test_odd_sizes_forward_and_backward(build: Callable[..., nn.Module], norm: str, pool: str) -> None:
    torch.manual_seed(0)
    model = build(norm=norm, pool=pool)
    logits = model(torch.randn(2, 3, 75, 101))
    assert logits.shape == (2, 3)
    logits.square().sum().backward()
    learning = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in learning.values())
    assert model.conv1.weight.grad.abs().max() > 0


def test_preactivation_order() -> None:
    """A v2 block with zeroed last convolution is the identity: nothing is activated after the sum."""
    block = resnet_v2(20, width=4).layer1[1]
    nn.init.zeros_(block.conv3.weight)
    x = torch.randn(1, 16, 9, 9)
    torch.testing.assert_close(block(x), x)


def test_frozen_norm_never_changes() -> None:
    torch.manual_seed(0)
    model = resnet10(2, width=8, norm="frozen")
    for module in model.modules():
        if isinstance(module, FrozenBatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 64, 64)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert torch.equal(model.train()(x), model.eval()(x))
    norms = [m for m in model.modules() if isinstance(m, FrozenBatchNorm2d)]
    assert norms
    assert not any(p.requires_grad for m in norms for p in m.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_train_norm_uses_the_batch() -> None:
    torch.manual_seed(0)
    model = resnet10(2, width=8)
    x = torch.randn(2, 3, 64, 64) + 3
    assert not torch.allclose(model.train()(x), model.eval()(x))


def test_group_norm_has_no_statistics_and_at_least_two_channels_a_group() -> None:
    groups = [m for m in resnet10(2, width=16, norm="group").modules() if isinstance(m, nn.GroupNorm)]
    assert groups
    assert all(m.num_channels // m.num_groups >= 2 for m in groups)
    assert not dict(resnet10(2, width=16, norm="group").named_buffers())
    assert resnet18(norm="group").bn1.num_groups == 32


def test_an_odd_number_of_channels_is_one_group() -> None:
    model = resnet18(norm="group", width=5)
    assert isinstance(model.bn1, nn.GroupNorm) and model.bn1.num_groups == 1
    assert model.layer2[0].bn1.num_groups == 1  # of 10 channels: two groups would be of an odd number each


def test_pool_is_the_mean_or_the_maximum_of_the_last_map() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 70, 90)
    for pool, reduce in (("avg", lambda m: m.mean((2, 3))), ("max", lambda m: m.amax((2, 3)))):
        model = resnet10(2, width=8, pool=pool).eval()
        maps: list[torch.Tensor] = []
        handle = model.layer4.register_forward_hook(lambda _m, _i, out, keep=maps: keep.append(out))
        logits = model(x)
        handle.remove()
        torch.testing.assert_close(logits, model.fc(reduce(maps[0])))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: resnet_v1(21), ["21", "6n + 2", "20 or 26"]),
        (lambda: resnet_v1(2), ["2", "8 or 14"]),
        (lambda: resnet_v2(165), ["165", "9n + 2", "164 or 173"]),
        (lambda: resnet_v2(30, block="basic"), ["30", "26 or 32"]),
        (lambda: resnet_v2(20, block="wide"), ["wide", "bottleneck"]),
        (lambda: resnet18(pool="median"), ["median", "avg", "max"]),
        (lambda: resnet18(norm="batch"), ["batch", "train", "frozen", "group"]),
        (lambda: resnet18(0), ["classes", "0"]),
    ],
)
def test_wrong_arguments_are_named(build: Callable[[], nn.Module], words: list[str]) -> None:
    with torch.device("meta"), pytest.raises(RequestError) as caught:
        build()
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("norm", ["train", "frozen", "group"])
def test_exports(norm: str) -> None:
    for model in (resnet10(2, width=8, norm=norm, pool="max"), resnet_v2(20, 2, width=4, norm=norm)):
        program = torch.export.export(model.train(), (torch.zeros(2, 3, 65, 97),)).run_decompositions({})
        assert tuple(next(iter(program.graph.output_node().args[0][-1:])).meta["val"].shape) == (2, 2)
