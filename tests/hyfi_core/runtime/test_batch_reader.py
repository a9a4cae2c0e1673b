"""What may be given as images, and what is said of anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError

NET = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
IMAGES = torch.ones(2, 3, 16, 16)


@pytest.fixture(scope="module")
def engine() -> Any:
    return hyfi_core.parallelize(NET, (2, 3, 16, 16), hyfi_core.ParallelPlan(((1, 1),)), AloneCommunicator())


@pytest.mark.parametrize(
    ("images", "named"), [(list(IMAGES), "list"), (IMAGES.numpy(), "numpy.ndarray"), (None, "NoneType")]
)
def test_images_of_another_kind_are_refused(engine: Any, images: Any, named: str) -> None:
    labels = torch.tensor([0, 1])
    expected = rf"images are a {named}; give a tensor \(2, 3, H, W\), or a function Box -> tensor"
    for call in (lambda: engine.accumulate(images, labels), lambda: engine.predict(images)):
        with pytest.raises(RequestError, match=expected):
            call()


def test_a_function_of_a_box_returns_a_tensor(engine: Any) -> None:
    wanted = NET(IMAGES)
    torch.testing.assert_close(engine.predict(lambda box: IMAGES[..., box.y0 : box.y1, box.x0 : box.x1]), wanted)
    with pytest.raises(RequestError, match=r"returned a numpy.ndarray; return a tensor \(B, C, h, w\)"):
        engine.predict(lambda box: np.ones((2, 3, *box.shape), np.float32))
