"""Weights from a local file: what torchvision and timm publish for ResNet-18, -34 and -50 fits whole.

Their names are held in ``tests/hyfi_core/models/test_resnet.py``; here a file under them goes through the loader.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.models import resnet
from workflows.finetuning.weights import load_weights, other_classes


def other_values(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.rand_like(t) if t.is_floating_point() else t + 7 for name, t in state.items()}


@pytest.mark.parametrize("make", [resnet.resnet18, resnet.resnet34, resnet.resnet50])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_of_the_same_names_is_loaded_whole(make: Callable[..., nn.Module], suffix: str, tmp_path: Path) -> None:
    model = make(1000, width=8)
    given = other_values(model.state_dict())
    path = tmp_path / f"resnet{suffix}"
    if suffix == ".pth":
        torch.save(given, path)
    else:
        save_file(given, path)
    report = load_weights(model, path)
    assert not (report.missing or report.unexpected or report.reshaped)
    assert all(torch.equal(tensor, given[name]) for name, tensor in model.state_dict().items())


def test_a_head_for_other_classes_keeps_its_own_values_and_is_named(tmp_path: Path) -> None:
    model = resnet.resnet18(2, width=8)
    torch.save(resnet.resnet18(1000, width=8).state_dict(), tmp_path / "published.pth")
    head = model.fc.weight.clone()
    assert set(load_weights(model, tmp_path / "published.pth").reshaped) == {"fc.weight", "fc.bias"}
    assert torch.equal(model.fc.weight, head)


class Wrapped(nn.Module):
    """A network inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = resnet.resnet18(2, width=8)


@pytest.mark.parametrize("prefix", ["module.", "model.", "module.encoder.net.", "_orig_mod."])
def test_a_prefix_of_the_file_is_removed_and_named(prefix: str, tmp_path: Path) -> None:
    given, model = resnet.resnet18(2, width=8).state_dict(), resnet.resnet18(2, width=8)
    torch.save({f"{prefix}{name}": tensor for name, tensor in given.items()}, tmp_path / "prefixed.pth")
    report = load_weights(model, tmp_path / "prefixed.pth")
    assert not (report.missing or report.unexpected) and f"names without '{prefix}'" in str(report)
    assert all(torch.equal(tensor, given[name]) for name, tensor in model.state_dict().items())


def test_a_prefix_of_the_model_is_added(tmp_path: Path) -> None:
    given, model = resnet.resnet18(2, width=8).state_dict(), Wrapped()
    torch.save({"module." + name: tensor for name, tensor in given.items()}, tmp_path / "plain.pth")
    report = load_weights(model, tmp_path / "plain.pth")
    assert "without 'module.' and with 'backbone.'" in str(report)
    assert all(torch.equal(tensor, given[name]) for name, tensor in model.backbone.state_dict().items())


def test_blocks_are_never_loaded_into_other_blocks(tmp_path: Path) -> None:
    """Their shapes may be equal; only a prefix that most names have is one."""
    block = resnet.resnet18(2, width=8).layer1[0].state_dict()
    torch.save({f"layer9.0.{name}": tensor for name, tensor in block.items()}, tmp_path / "block.pth")
    with pytest.raises(RequestError, match="none of its 12 tensors matches"):
        load_weights(resnet.resnet18(2, width=8), tmp_path / "block.pth")


@pytest.mark.parametrize("keys", [("state_dict",), ("model",), ("teacher", "model_state_dict"), ("state_dict_ema",)])
def test_wrappers_of_training_scripts_are_opened_and_named(keys: tuple[str, ...], tmp_path: Path) -> None:
    given, model = resnet.resnet18(2, width=8).state_dict(), resnet.resnet18(2, width=8)
    value: dict[str, Any] = dict(given)
    for key in reversed(keys):
        value = {key: value, "epoch": 3, "optimizer": {"state": {}}}
    torch.save(value, tmp_path / "wrapped.pth")
    assert f"({'.'.join(keys)!r} of the file)" in str(load_weights(model, tmp_path / "wrapped.pth"))
    assert torch.equal(model.fc.weight, given["fc.weight"])


def test_an_average_beside_the_weights_is_mentioned(tmp_path: Path) -> None:
    state = resnet.resnet18(2, width=8).state_dict()
    torch.save({"state_dict": state, "state_dict_ema": state}, tmp_path / "both.pth")
    report = load_weights(resnet.resnet18(2, width=8), tmp_path / "both.pth")
    assert "('state_dict' of the file; it has 'state_dict_ema', too)" in str(report)


def test_the_report_has_a_line_for_each_part(tmp_path: Path) -> None:
    torch.save(resnet.resnet18(1000, width=8).state_dict(), tmp_path / "published.pth")
    lines = str(load_weights(resnet.resnet18(2, width=8), tmp_path / "published.pth")).splitlines()
    assert lines[0] == "100 of 102 tensors loaded"
    assert lines[1].split() == ["conv1", "1", "of", "1"]
    assert "  fc         0 of    2  keeps initial values" in lines
    assert lines[-1] == "reshaped (2): fc.weight, fc.bias"


@pytest.mark.parametrize("value", [{"epoch": 3, "args": {"lr": 1.0}}, [1, 2], torch.ones(2), {}])
def test_files_without_weights_are_refused(value: object, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "other.pth")
    with pytest.raises(RequestError, match=r"other.pth: has .* not a state_dict"):
        load_weights(resnet.resnet18(2, width=8), tmp_path / "other.pth")


def test_arguments_beside_the_weights_do_not_matter_and_other_objects_are_named_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = resnet.resnet18(2, width=8)
    torch.save({"model": model.state_dict(), "args": argparse.Namespace(lr=0.1)}, "mae.pth")
    assert str(load_weights(resnet.resnet18(2, width=8), Path("mae.pth"))).startswith("102 of 102")
    torch.save({"step": Path("log"), "net": {"teacher": model, "loss": {"best": numpy.float64(1.0)}}}, "whole.pth")
    with pytest.raises(RequestError, match=r"has objects besides tensors .* may run code") as refused:
        load_weights(model, Path("whole.pth"))
    code = str(refused.value).partition('python -c "')[2].rpartition('"')[0]
    exec(code, {})
    again = str(load_weights(resnet.resnet18(2, width=8), Path("weights.pth")))
    assert again.startswith("102 of 102 tensors loaded ('net.teacher' of the file)")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("w.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of Git LFS"),
        ("w.pth", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of Git LFS"),
        ("w.pth", b"<!DOCTYPE html><html></html>", "is a web page"),
        ("w.pth", b"", "is empty"),
        ("w.pth", b"\x89HDF\r\n\x1a\n00000", "neither of safetensors nor of torch.save"),
    ],
)
def test_content_in_place_of_weights_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError, match=message) as refused:
        load_weights(nn.Linear(1, 1), tmp_path / name)
    assert "weights_only" not in str(refused.value)
    with pytest.raises(RequestError, match=f"is a folder; name one of its files: {name}"):
        load_weights(nn.Linear(1, 1), tmp_path)


@pytest.mark.parametrize(
    ("classes", "said"), [(["cat", "dog"], False), (["dog", "cat"], True), (["hen", "cow"], True), (["dog"], False)]
)
def test_weights_of_a_checkpoint_with_its_classes_in_another_order_are_mentioned(
    classes: list[str], said: bool, tmp_path: Path
) -> None:
    """The head fitted, so it was loaded without a word, and began with its classes swapped."""
    (tmp_path / "model.json").write_text('{"class_names": ["cat", "dog"]}')
    line = other_classes(tmp_path / "model.safetensors", classes)
    assert (line is not None) == said
    assert line is None or f"the classes cat, dog; in this run they are, in this order, {', '.join(classes)}" in line
    (tmp_path / "model.json").write_text("[]")
    assert other_classes(tmp_path / "model.safetensors", classes) is None


def test_an_entry_that_is_no_tensor_is_named(tmp_path: Path) -> None:
    torch.save(nn.Linear(1, 1).state_dict() | {"epoch": 3}, tmp_path / "w.pth")
    with pytest.raises(RequestError, match=r"not tensors among the weights: 'epoch' \(int\)"):
        load_weights(nn.Linear(1, 1), tmp_path / "w.pth")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of another user; the message that looks into the file ended with a traceback."""
    (tmp_path / "w.pth").write_bytes(b"")

    def refuse(*given: Any, **named: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RequestError, match=r"w.pth: cannot be read \(Permission denied\)"):
        load_weights(nn.Linear(1, 1), tmp_path / "w.pth")


def test_integers_of_a_quantised_file_are_refused_as_weights(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1, 1, dtype=torch.int8), "bias": torch.ones(1)}, tmp_path / "w.pth")
    with pytest.raises(RequestError, match=r"int8 numbers in place of weights \(weight\)"):
        load_weights(nn.Linear(1, 1), tmp_path / "w.pth")


def test_tensors_of_a_torchscript_program_are_extracted_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    linear = nn.Linear(1, 1)
    torch.jit.script(linear).save("program.pt")
    with pytest.warns(UserWarning, match="TorchScript"), pytest.raises(RequestError, match="is a program") as refused:
        load_weights(linear, Path("program.pt"))
    exec(str(refused.value).partition('python -c "')[2].rpartition('"')[0], {})
    assert str(load_weights(linear, Path("weights.pth"))).startswith("2 of 2")


def test_a_file_of_two_networks_is_refused_with_the_parts_that_fit(tmp_path: Path) -> None:
    state = resnet.resnet18(2, width=8).state_dict()
    both = {f"{part}.{name}": tensor for part in ("query", "key") for name, tensor in state.items()}
    torch.save(both, tmp_path / "moco.pth")
    with pytest.raises(RequestError, match=r"122 under 'key.', 122 under 'query.' would fit; save the tensors of one"):
        load_weights(resnet.resnet18(2, width=8), tmp_path / "moco.pth")


@pytest.mark.parametrize("first", [True, False])
def test_of_a_name_with_and_without_the_prefix_the_one_with_it_is_taken(first: bool, tmp_path: Path) -> None:
    state = other_values(resnet.resnet18(2, width=8).state_dict())
    other = {"fc.weight": torch.full_like(state["fc.weight"], 7.0)}
    prefixed = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save({**other, **prefixed} if first else {**prefixed, **other}, tmp_path / "weights.pth")
    model = resnet.resnet18(2, width=8)
    load_weights(model, tmp_path / "weights.pth")
    assert torch.equal(model.fc.weight, state["fc.weight"])
