"""States on disk, read by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hyfi_core.process_memory import resident_bytes
from hyfi_core.stored_state import StoredState


def test_tensors_of_several_files_are_read_by_name(tmp_path: Path) -> None:
    parts = [{"a": torch.randn(3, 2), "b": torch.arange(4)}, {"c": torch.randn(()).bfloat16()}]
    files = [tmp_path / f"{n}.safetensors" for n in range(2)]
    for part, path in zip(parts, files, strict=True):
        save_file(part, path)
    state = StoredState(files, "same")
    assert list(state) == ["a", "b", "c"] and len(state) == 3
    assert all(torch.equal(state[name], value) for part in parts for name, value in part.items())
    read = state["a"]
    state.close()
    assert len(state) == 0 and torch.equal(read, parts[0]["a"])
    with pytest.raises(KeyError):
        state["a"]


def test_only_what_is_used_is_read(tmp_path: Path) -> None:
    size = 4 << 20
    save_file({str(n): torch.full((size // 4,), float(n)) for n in range(16)}, tmp_path / "state.safetensors")
    before = resident_bytes()
    state = StoredState([tmp_path / "state.safetensors"], "same")
    shapes = {name: tensor.to("meta").shape for name, tensor in state.items()}
    assert state["3"].sum() == 3 * size // 4
    assert resident_bytes() - before < 4 * size
    assert len(shapes) == 16
