from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from hyfi_core.errors import RequestError
from hyfi_core.runtime import checkpoint as cp
from hyfi_core.runtime.saving.optimizer_state import load_optimizer_state, optimizer_state


def tied_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def trained(kind: str, steps: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = tied_model()
    optimizer: torch.optim.Optimizer
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    for _ in range(steps):
        step(model, optimizer, torch.randn(8, 4))
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def save(folder: Path, kind: str = "sgd", **more: object) -> torch.nn.Module:
    model, optimizer = trained(kind)
    cp.save_checkpoint(
        folder,
        weights=model.state_dict(),
        model={"model": {"name": "tied"}, "step": 3},
        optimizer=optimizer_state(optimizer, model.named_parameters()),
        state={"step": 3, **more},
    )
    return model


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_training_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    model, optimizer = trained(kind)
    cp.save_checkpoint(
        tmp_path / "c",
        weights=model.state_dict(),
        model={"step": 3},
        optimizer=optimizer_state(optimizer, model.named_parameters()),
        state={"step": 3},
    )
    other = tied_model(seed=5)
    again: torch.optim.Optimizer
    if kind == "sgd":
        again = torch.optim.SGD(other.parameters(), lr=5.0, momentum=0.1)
    else:
        again = torch.optim.AdamW(other.parameters(), lr=5.0, betas=(0.1, 0.2))
    other.load_state_dict(cp.load_checkpoint(tmp_path / "c").weights)
    saved = cp.load_training_state(tmp_path / "c")
    load_optimizer_state(again, other.named_parameters(), saved.optimizer)
    for k in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(k))
        step(model, optimizer, x)
        step(other, again, x)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_round_trip_of_state(tmp_path: Path) -> None:
    model = save(tmp_path / "c", lr=0.1 + 0.2)
    loaded = cp.load_checkpoint(tmp_path / "c")
    assert loaded.model["model"] == {"name": "tied"} and loaded.model["format"] == 1
    assert all(torch.equal(loaded.weights[k], v) for k, v in model.state_dict().items())
    assert cp.load_training_state(tmp_path / "c").state["lr"] == 0.1 + 0.2


@pytest.mark.parametrize(
    "name", [cp.WEIGHTS_FILE, cp.OPTIMIZER_TENSORS_FILE, cp.OPTIMIZER_FILE, cp.STATE_FILE, cp.MODEL_FILE]
)
@pytest.mark.parametrize("harm", ["truncate", "remove", "flip"])
def test_a_harmed_file_is_named(tmp_path: Path, name: str, harm: str) -> None:
    save(tmp_path / "c")
    path = tmp_path / "c" / name
    if harm == "truncate":
        os.truncate(path, path.stat().st_size // 2)
    elif harm == "remove":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    with pytest.raises(RequestError, match=name):
        cp.load_checkpoint(tmp_path / "c")
        cp.load_training_state(tmp_path / "c")


def test_another_format_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "c")
    path = tmp_path / "c" / cp.MODEL_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 7}))
    with pytest.raises(RequestError, match="format 7"):
        cp.load_checkpoint(tmp_path / "c")


def test_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such folder"):
        cp.load_checkpoint(tmp_path / "nothing")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(RequestError, match="checkpoints/best"):
        cp.load_checkpoint(tmp_path)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "step-00000001")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cp, "sync_file", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path / "step-00000002")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_an_optimiser_of_another_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "c")
    other = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(RequestError, match="other parameters"):
        load_optimizer_state(optimizer, other.named_parameters(), cp.load_training_state(tmp_path / "c").optimizer)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_files_may_be_read_by_whom_the_umask_lets(tmp_path: Path, umask: int, mode: int) -> None:
    """Weights and moments were the owner's alone, whatever the umask."""
    before = os.umask(umask)
    try:
        save(tmp_path / "step-3")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "step-3").iterdir()} == {mode}


def test_a_file_of_somebody_else_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "step-3")

    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(cp, "_fingerprint", denied)
    words = r"model.safetensors cannot be read .Permission denied.; let its owner give you access"
    with pytest.raises(RequestError, match=words):
        cp.load_checkpoint(tmp_path / "step-3")
