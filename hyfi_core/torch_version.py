"""Which versions of PyTorch compute right."""

from __future__ import annotations

import torch

from hyfi_core.errors import RequestError

OLDEST = (2, 9)
"""The first version whose ``torch.export`` keeps what a forward computes without gradients apart from the rest."""


def check_torch_version() -> None:
    """Refuse a PyTorch that is older: pip would not install it, but a cluster's own may come first.

    Raises:
        RequestError: it would lose ``torch.no_grad`` in a model's forward, without an error.
    """
    # By its first two numbers: NVIDIA's containers have 2.9.0a0, which a comparison of versions puts before 2.9.
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < OLDEST:
        raise RequestError(
            f"this is torch {torch.__version__}, whose captures of a model lose torch.no_grad; "
            f"install torch {'.'.join(map(str, OLDEST))} or newer"
        )
