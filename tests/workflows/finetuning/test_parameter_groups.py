"""Learning rate and weight decay of each parameter."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.models.resnet import resnet10
from workflows.config.learning import OptimizerConfig
from workflows.finetuning.parameter_groups import layer_depths, parameter_groups


def rates(model: nn.Module, **config: Any) -> dict[str, tuple[float, float]]:
    groups = parameter_groups(model, OptimizerConfig(**config), 1)
    found = [(name, (group.lr, group.weight_decay)) for group in groups for name in group.names]
    assert sorted(name for name, _ in found) == sorted(name for name, _ in model.named_parameters())
    return dict(found)


def test_without_settings_there_is_one_group() -> None:
    for name in ("sgd", "adam", "adamw"):
        assert len(parameter_groups(resnet10(2, width=8), OptimizerConfig(name=name), 1)) == 1
    assert len(parameter_groups(resnet10(2, width=8), OptimizerConfig(name="sgd", weight_decay=0.1), 1)) == 1


def test_adamw_does_not_decay_norms_and_biases_unless_asked() -> None:
    model = resnet10(2, width=8)
    found = rates(model, weight_decay=0.1)
    assert {decay for name, (_, decay) in found.items() if name.endswith(("bias", "bn1.weight"))} == {0.0}
    assert found["fc.weight"] == found["conv1.weight"] == (1e-3, 0.1)
    assert {decay for _, decay in rates(model, weight_decay=0.1, decay_norms=True).values()} == {0.1}
    assert rates(model, name="sgd", weight_decay=0.1, decay_norms=False)["fc.bias"] == (1e-3, 0.0)


def test_the_first_group_that_matches_counts() -> None:
    groups = [{"match": "fc.bias", "weight_decay": 0.5}, {"match": ["fc", "layer4"], "lr": 1e-2}]
    found = rates(resnet10(2, width=8), groups=groups, weight_decay=0.1)
    assert found["fc.bias"] == (1e-3, 0.5)  # a norm or bias decays where a group says so
    assert found["fc.weight"] == (1e-2, 0.1) and found["layer4.0.bn1.weight"] == (1e-2, 0.0)
    assert found["layer3.0.conv1.weight"] == (1e-3, 0.1)


def test_rates_are_scaled_with_the_batch_in_groups_too() -> None:
    config = OptimizerConfig(lr_scaling="linear", groups=({"match": "fc", "lr": 1e-2},))
    assert {group.lr for group in parameter_groups(resnet10(2, width=8), config, 4)} == {4e-3, 4e-2}


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"match": "head", "lr": 1.0}], r"groups\[0\].match: 'head' matches no parameter .* its modules are conv1"),
        ([{"match": "*", "lr": 1.0}, {"match": "fc", "lr": 2.0}], r"groups\[1\].match: all .* put it before"),
    ],
)
def test_groups_without_parameters_are_refused(groups: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        rates(resnet10(2, width=8), groups=groups)


class Encoder(nn.Module):
    """A transformer in outline: tokens, blocks in a list inside a trunk, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Module()
        self.trunk.token = nn.Parameter(nn.Linear(8, 1).weight.detach())
        self.trunk.patches = nn.Linear(8, 8)
        self.trunk.encoder = nn.Module()
        self.trunk.encoder.layer = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3))
        self.trunk.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)


def test_layers_are_the_blocks_of_the_trunk_and_what_is_around_them() -> None:
    depths = layer_depths(Encoder())
    assert depths["trunk.token"] == depths["trunk.patches.weight"] == 0
    assert [depths[f"trunk.encoder.layer.{block}.0.bias"] for block in range(3)] == [1, 2, 3]
    assert (depths["trunk.norm.weight"], depths["head.bias"]) == (4, 5)
    found = layer_depths(resnet10(2, width=8))  # one block each
    assert [found[f"{name}.weight"] for name in ("conv1", "bn1", "layer1.0.conv1", "layer4.0.conv2", "fc")] == [
        0,
        1,
        2,
        5,
        6,
    ]


def test_the_rate_decays_from_the_head_to_the_first_layer() -> None:
    found = rates(Encoder(), layer_decay=0.5, groups=[{"match": "head", "lr": 1.0}], lr=1e-3)
    assert found["head.weight"][0] == 1.0 and found["trunk.norm.weight"][0] == 0.5e-3
    assert found["trunk.token"][0] == pytest.approx(1e-3 / 32)
