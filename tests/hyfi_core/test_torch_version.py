"""A PyTorch that loses parts of a forward is refused by name, where a cluster's own comes before pip's."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from hyfi_core.capture.export import capture
from hyfi_core.errors import RequestError
from hyfi_core.torch_version import OLDEST


@pytest.mark.parametrize(("version", "is_refused"), [("2.8.0+cu128", True), ("2.9.0a0+nv25.9", False)])
def test_older_versions_than_those_of_the_tests_are_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, is_refused: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    model, shape = nn.Conv2d(3, 2, 1), (1, 3, 4, 4)
    if not is_refused:
        capture(model, shape, torch.float32)
        return
    with pytest.raises(RequestError, match=r"this is torch 2\.8\.0\+cu128, .* install torch 2\.9 or newer"):
        capture(model, shape, torch.float32)


def test_pip_installs_no_version_that_is_refused() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (requirement,) = [r for r in project["project"]["dependencies"] if r.startswith("torch")]
    assert requirement.startswith(f"torch>={OLDEST[0]}.{OLDEST[1]},")
