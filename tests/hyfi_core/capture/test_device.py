"""Capture of a model on a GPU: the image is where the model is, and programs of ranks do not differ by their GPUs.

There is no GPU here. Fake tensors on one can be made, but not traced, so what is given to the export is looked at.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hyfi_core.capture.export import _argument, capture
from hyfi_core.errors import RequestError

SHAPE = (2, 3, 8, 8)


class ExportedError(Exception):
    """Stops a capture where it would be exported."""


@pytest.mark.parametrize("released", [False, True])
def test_the_image_is_on_the_device_of_the_model(released: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with FakeTensorMode():
        for module in model:
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                device = "meta" if released and isinstance(module, nn.Conv2d) else "cuda"
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                held = module._parameters if name in module._parameters else module._buffers
                held[name] = nn.Parameter(made) if held is module._parameters else made
    devices: list[str] = []

    def export(module: nn.Module, images: tuple[torch.Tensor], **_: Any) -> None:
        devices.extend(tensor.device.type for tensor in (*images, *module.parameters()))
        raise ExportedError

    monkeypatch.setattr(torch.export, "export", export)
    with pytest.raises(RequestError, match="Exported"):
        capture(model, SHAPE, torch.float32)
    assert devices == ["cuda"] * 5


def test_devices_in_a_program_have_no_number() -> None:
    assert _argument([torch.device("cuda", 3), torch.device("cpu")]) == [torch.device("cuda"), torch.device("cpu")]
