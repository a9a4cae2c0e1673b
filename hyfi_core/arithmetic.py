"""How PyTorch computes on GPUs: settings of a process."""

from __future__ import annotations

import os

import torch


def set_arithmetic(tf32: bool, deterministic: bool = False) -> None:
    """Set how this process computes on GPUs; called before it uses one.

    Args:
        tf32: Whether float32 products and convolutions may round their operands to TF32.
        deterministic: Whether only operators are used that repeat their results; others raise an error.
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS does not repeat
        # On by default in this mode: uninitialised tensors would be filled with NaN, at the price of a kernel each.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
