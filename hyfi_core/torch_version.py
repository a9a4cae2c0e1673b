"""The versions of PyTorch that compute correct results."""

from __future__ import annotations

import torch

from hyfi_core.errors import RequestError

OLDEST = (2, 9)
"""The first version whose ``torch.export`` keeps ``torch.no_grad`` inside of a forward."""


def check_torch_version() -> None:
    """Refuse a PyTorch before ``OLDEST``: pip does not install one, but a cluster's own may be imported instead.

    Raises:
        RequestError: it would lose ``torch.no_grad`` in a model's forward, without an error.
    """
    # Only the first two numbers are compared: NVIDIA's containers have 2.9.0a0, which as a version is before 2.9.
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < OLDEST:
        raise RequestError(
            f"this is torch {torch.__version__}, whose captures of a model lose torch.no_grad; "
            f"install torch {'.'.join(map(str, OLDEST))} or newer"
        )
