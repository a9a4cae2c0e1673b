"""Encoders by name: their weights, their normalisation, what is random, and what is refused."""

from __future__ import annotations

import copy
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.models.resnet import resnet10
from tests.workflows.encoders.timm_here import timm_or_skip
from workflows.config.data import ModelConfig
from workflows.encoders.load import load_encoder
from workflows.encoders.lora import add_lora, is_lora
from workflows.encoders.timm_encoder import import_timm
from workflows.encoders.trained_part import frozen_patterns
from workflows.encoders.transformers_encoder import architecture_of, pooled
from workflows.finetuning.freezing import freeze

TINY = {"embed_dim": 24, "depth": 3, "num_heads": 2, "img_size": 32}
TILES = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class MeanColour(nn.Module):
    """Vectors of three numbers: the mean of each channel."""

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        return tiles.mean((2, 3))


def mean_colour() -> nn.Module:
    return MeanColour()


def scripted() -> nn.Module:
    return torch.jit.script(MeanColour())


def maps(channels: int = 4) -> nn.Module:
    return nn.Conv2d(3, channels, 3)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def timm() -> Iterator[ModuleType]:
    with timm_or_skip() as timm:
        yield timm


def normalised(tiles: torch.Tensor, mean: float, std: float) -> torch.Tensor:
    return (tiles.float() / 255 - mean) / std


def test_a_name_of_timms_with_a_file_of_weights(timm: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7, **TINY).eval()
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "weights.safetensors")
    encoder = load_encoder("timm:vit_tiny_patch16_224", tmp_path / "weights.safetensors", size_px=32, options=TINY)
    assert encoder.features == 24 and not encoder.untrained and not encoder.module.training
    assert encoder.normalisation.mean == (0.5, 0.5, 0.5) and "timm" in encoder.normalisation_from
    assert "not used: head.bias, head.weight" in str(encoder)
    with torch.inference_mode():
        plain = model.forward_head(model.forward_features(normalised(TILES, 0.5, 0.5)), pre_logits=True)
    assert torch.allclose(encoder.encode(TILES), plain, atol=1e-5)
    half = encoder.encode(TILES, torch.bfloat16)
    assert half.dtype == torch.float32 and 0 < (half - plain).abs().max() < 0.1


def test_random_weights_are_named_and_can_be_refused(timm: ModuleType, tmp_path: Path) -> None:
    encoder = load_encoder("timm:vit_tiny_patch16_224", size_px=32, options=TINY)
    assert len(encoder.untrained) == len(encoder.module.state_dict()) and "weights: random" in str(encoder)
    with pytest.raises(RequestError, match=r"its weights are random \(all\); give a file"):
        encoder.check_trained("give a file")
    state = encoder.module.state_dict()
    partial = {name: value for name, value in state.items() if name not in ("cls_token", "norm.weight")}
    partial["pos_embed"] = torch.zeros(1, 197, 24)
    save_file(partial, tmp_path / "partial.safetensors")
    encoder = load_encoder("timm:vit_tiny_patch16_224", tmp_path / "partial.safetensors", size_px=32, options=TINY)
    # `hyfi train` prints this line alone: it read as if all weights were loaded.
    assert re.search(r"which lack 3 of \d+ tensors \(cls_token, norm.weight, pos_embed\); mean", str(encoder))
    with pytest.raises(RequestError, match=r"random \(3 of \d+: cls_token, norm.weight, pos_embed\)"):
        encoder.check_trained("give a file")


def test_a_folder_of_timms(timm: ModuleType, tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, **TINY).eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    stated = {"mean": [0.7, 0.6, 0.5], "std": [0.2, 0.2, 0.3], "input_size": [3, 32, 32]}
    configuration = {"architecture": "vit_tiny_patch16_224", "model_args": TINY, "num_classes": 0}
    (tmp_path / "config.json").write_text(json.dumps(configuration | {"pretrained_cfg": stated}))
    encoder = load_encoder(f"timm:{tmp_path}", size_px=32)
    assert encoder.normalisation.mean == (0.7, 0.6, 0.5) and not encoder.untrained
    again = load_encoder(f"timm:{tmp_path}", size_px=32)
    assert encoder.digest() == again.digest() and torch.equal(encoder.encode(TILES), again.encode(TILES))
    with torch.no_grad():
        next(again.module.parameters()).view(-1)[0] += 1e-3
    assert encoder.digest() != again.digest()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_tiny", r"encoder 'vit_tiny': use timm:NAME or timm:FOLDER"),
        ("timm:vit_tine_patch16_224", r"has no such model; it has vit_"),
        ("timm:hf-hub:MahmoodLab/UNI", "nothing is downloaded; use the folder that you downloaded"),
        ("timm:vit_tiny_patch16_224", r"does not take tiles of 32 × 32 px .*dynamic_img_size"),
    ],
)
def test_what_timm_does_not_have(timm: ModuleType, name: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        load_encoder(name, size_px=32)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'timm'", name="timm"), r"timm is not installed; .*hyfi\[encoders\]"),
        (RuntimeError("operator torchvision::nms does not exist"), "torchvision does not fit PyTorch"),
    ],
)
def test_timm_that_cannot_be_imported_is_explained(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr("workflows.encoders.timm_encoder.import_module", fail)
    with pytest.raises(RequestError, match=message):
        import_timm()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    torch.manual_seed(2)
    model = transformers.ViTModel(transformers.ViTConfig(image_size=32, **size))
    folder = tmp_path_factory.mktemp("vit")
    model.save_pretrained(folder)
    stated = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "rescale_factor": 1 / 127.5}
    (folder / "preprocessor_config.json").write_text(json.dumps(stated))
    return folder


def test_a_folder_of_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    encoder = load_encoder(f"transformers:{folder}", size_px=32)
    assert encoder.features == 24 and not encoder.untrained and encoder.weights == str(folder)
    assert "preprocessor_config.json" in encoder.normalisation_from
    plain = transformers.ViTModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = plain((TILES.float() / 127.5 - 0.5) / 0.25).pooler_output
    assert torch.allclose(encoder.encode(TILES), expected, atol=1e-5)


def test_without_a_pooler_in_the_file_it_is_the_class_token(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    plain = transformers.ViTModel.from_pretrained(folder, add_pooling_layer=False).eval()
    plain.save_pretrained(tmp_path)
    encoder = load_encoder(f"transformers:{tmp_path}", size_px=32, mean=[0, 0, 0], std=[1, 1, 1])
    with torch.inference_mode():
        expected = plain(TILES.float() / 255).last_hidden_state[:, 0]
    assert not encoder.untrained and torch.allclose(encoder.encode(TILES), expected, atol=1e-5)
    (tmp_path / "model.safetensors").unlink()
    assert "weights: random" in str(load_encoder(f"transformers:{tmp_path}", size_px=32))
    with pytest.raises(RequestError, match="no such folder, and nothing is downloaded"):
        load_encoder("transformers:google/vit-base-patch16-224", size_px=32)


def test_a_factory_of_the_users() -> None:
    encoder = load_encoder(f"{__name__}:mean_colour", size_px=32)
    assert encoder.features == 3 and "states none" in encoder.normalisation_from and not encoder.untrained
    mean = torch.tensor(encoder.normalisation.mean)
    std = torch.tensor(encoder.normalisation.std)
    expected = (TILES.float().mean((2, 3)) / 255 - mean) / std
    assert torch.allclose(encoder.encode(TILES), expected, atol=1e-5)
    # Encoders are not captured: as many are published as a program of TorchScript.
    assert torch.allclose(load_encoder(f"{__name__}:scripted", size_px=32).encode(TILES), expected, atol=1e-5)
    with pytest.raises(RequestError, match=r"it returns \(2, 4, 30, 30\) torch.float32, not one vector for each tile"):
        load_encoder(f"{__name__}:maps", size_px=32)
    with pytest.raises(RequestError, match="give both, or none"):
        load_encoder(f"{__name__}:mean_colour", mean=[0, 0, 0])
    with pytest.raises(RequestError, match="standard deviations above 0"):
        load_encoder(f"{__name__}:mean_colour", mean=[0, 0, 0], std=[1, 0, 1])


def trained(encoder: nn.Module, train: str) -> set[str]:
    """What is trained of an encoder inside a model with a head."""
    model = nn.ModuleDict({"encoder": encoder, "aggregator": nn.Linear(2, 2)})
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    patterns = tuple(f"encoder.{pattern}" for pattern in frozen_patterns(encoder, train))
    freeze(model, ModelConfig(freeze=patterns))
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {"aggregator.weight", "aggregator.bias"} <= names
    return {name.removeprefix("encoder.") for name in names if name.startswith("encoder.")}


def test_the_trained_part_of_a_vit(timm: ModuleType) -> None:
    encoder = timm.create_model("vit_tiny_patch16_224", num_classes=0, **TINY)
    names = {name for name, _ in encoder.named_parameters()}
    assert trained(encoder, "all") == names and trained(encoder, "none") == trained(encoder, "last:0") == set()
    norms = {name for name in names if "norm" in name}
    assert trained(encoder, "norms") == norms and {"norm.weight", "blocks.2.norm1.bias"} <= norms
    last = {name for name in names if name.startswith(("blocks.1.", "blocks.2.", "norm."))}
    assert trained(encoder, "last:2") == last
    assert frozen_patterns(encoder, "last:2") == ("cls_token", "pos_embed", "patch_embed", "blocks.0")
    with pytest.raises(RequestError, match=r"last:9: the encoder has 3 blocks"):
        frozen_patterns(encoder, "last:9")
    with pytest.raises(RequestError, match=r"given 'some'; allowed: all, none, norms, last:N"):
        frozen_patterns(encoder, "some")


def test_the_trained_part_of_a_resnet() -> None:
    encoder = resnet10(2, width=8)
    assert {name.split(".")[0] for name in trained(encoder, "last:1")} == {"layer4", "fc"}
    assert {name.split(".")[-2] for name in trained(encoder, "norms")} == {"bn1", "bn2", "1"}
    with pytest.raises(RequestError, match="no norm with parameters"):
        frozen_patterns(nn.Sequential(nn.Conv2d(3, 4, 3)), "norms")


def test_low_rank_updates_add_their_product(timm: ModuleType) -> None:
    """Of linear layers, and of attention that uses its weights directly; at first nothing changes."""
    torch.manual_seed(4)
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=0, **TINY).double().eval()
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64).eval()
    for encoder, given, count in (
        (vit, normalised(TILES, 0.5, 0.5).double(), 12),
        (layer, torch.rand(2, 5, 8).double(), 4),
    ):
        plain, before = copy.deepcopy(encoder), encoder(given)
        assert add_lora(encoder, 3) == count and torch.allclose(encoder(given), before, atol=1e-12)
        state = plain.state_dict()
        for name, parameter in encoder.named_parameters():
            if name.endswith(".0.up"):
                nn.init.normal_(parameter, std=0.1)
                place, _, weight = name.removesuffix(".0.up").rpartition(".parametrizations.")
                down = encoder.get_parameter(name.removesuffix("up") + "down")
                state[f"{place}.{weight}"] = state[f"{place}.{weight}"] + 2.0 * parameter.detach() @ down.detach()
        plain.load_state_dict(state)
        assert torch.allclose(encoder(given), plain(given), atol=1e-12) and not torch.allclose(plain(given), before)
        for name, parameter in encoder.named_parameters():
            parameter.requires_grad_(is_lora(name))
        encoder(given).square().sum().backward()
        assert {name for name, p in encoder.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0} == {
            name for name, _ in encoder.named_parameters() if is_lora(name)
        }
    assert trained(vit, "lora:3") == {name for name, _ in vit.named_parameters() if is_lora(name)}
    for encoder, rank, message in (
        (nn.Conv2d(3, 4, 3), 2, "the encoder has no linear layers"),
        (nn.Sequential(nn.Linear(9, 4)), 4, r"0\.weight is \(4, 9\); use a rank below 4"),
    ):
        with pytest.raises(RequestError, match=message):
            add_lora(encoder, rank)


@pytest.mark.parametrize("pools", [True, False])
def test_an_encoder_of_transformers_is_built_again_without_its_folder(folder: Path, pools: bool) -> None:
    transformers = pytest.importorskip("transformers")
    module = transformers.ViTModel.from_pretrained(folder, add_pooling_layer=pools)
    architecture = json.loads(json.dumps(architecture_of(module)))
    again = load_encoder("transformers:nowhere", size_px=32, mean=[0, 0, 0], std=[1, 1, 1], architecture=architecture)
    again.module.load_state_dict(module.state_dict())
    tiles = torch.rand(2, 3, 32, 32)
    assert torch.equal(again.vectors(again.module(tiles)), pooled(module.eval()(tiles)))
