"""What CUDA's kernels accept of the operators that our code calls by name.

Ours are called with arguments that plain PyTorch never passes, and a CPU accepts more than CUDA does: ``CheckedCalls``
lets a test without a GPU fail where CUDA would refuse a call, or compute something else. Pointwise operators in place
or with ``out=`` (``mul``, ``addcmul_``, ``copy_``, ``_foreach_*``) are not listed: ``TensorIterator`` checks them alike
on every device. The output may be an operand, never a part of one, and has any dtype to which the common one can be
cast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Kernel:
    """What an operator's CUDA kernel takes, by the source of PyTorch 2.11 to 2.13.

    Attributes:
        source: function, in ``aten/src/ATen/native``.
        ours: what is particular about our calls.
        takes: what the kernel takes.
        accepts: whether it takes these arguments as the CPU's does; None: all that the CPU's takes.
    """

    source: str = ""
    ours: str = "as plain PyTorch"
    takes: str = "what the CPU's takes"
    accepts: Callable[..., bool] | None = None


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which CUDA's kernels accumulate values of a dtype."""
    return torch.promote_types(dtype, torch.float32)


def _parameters(x: torch.Tensor, *parameters: torch.Tensor | None) -> bool:
    kinds = {parameter.dtype for parameter in parameters if parameter is not None}
    return len(kinds) <= 1 and kinds <= {x.dtype, accumulated(x.dtype)}


def _normalised(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *_: Any) -> bool:
    return training or (mean is not None and variance is not None and _parameters(x, weight, bias))


def _statistics(x: Any, mean: Any, variance: Any, *_: Any) -> bool:
    return (mean is None) == (variance is None) and (mean is None or mean.dtype == variance.dtype)


def _normalised_back(dy: Any, x: Any, weight: Any, mean: Any, variance: Any, *rest: Any) -> bool:
    saved, kind = rest[:2], accumulated(x.dtype)
    return (
        dy.dtype == x.dtype
        and all(one is not None and one.dtype == kind and one.is_contiguous() for one in saved)
        and (weight is None or _parameters(x, weight))
    )


def _normalised_by(x: Any, weight: Any, bias: Any, mean: Any, invstd: Any, *_: Any) -> bool:
    return _parameters(x, weight, bias) and mean.dtype == invstd.dtype == accumulated(x.dtype)


def _normalised_back_of_map(dy: Any, x: Any, *numbers: Any) -> bool:
    mean, invstd, weight, sum_dy, sum_dy_xmu, count = numbers
    kinds = {one.dtype for one in (mean, invstd, weight, sum_dy, sum_dy_xmu) if one is not None}
    return dy.dtype == x.dtype and kinds == {accumulated(x.dtype)} and count.dtype == torch.int32


def _pooled_back(dy: Any, x: Any, *_: Any, grad_input: Any) -> bool:
    return dy.dtype == x.dtype == grad_input.dtype and bool(
        grad_input.is_contiguous(memory_format=suggest_memory_format(x))
    )


def _averaged_back(dy: Any, x: Any, kernel: Any, stride: Any, padding: Any, *rest: Any, grad_input: Any) -> bool:
    plain = suggest_memory_format(x) == torch.contiguous_format
    return _pooled_back(dy, x, grad_input=grad_input) and (plain or not any(padding))


def _convolved(*tensors: Any) -> bool:
    return len({one.dtype for one in tensors[:3] if isinstance(one, torch.Tensor)}) == 1


KERNELS: Mapping[str, Kernel] = {
    "native_batch_norm.default": Kernel(
        "cuda/Normalization.cu: batch_norm_cuda_out",
        "evaluation mode; 16-bit maps, all else in float32; weight or bias missing",
        "any strides; weight and bias of one dtype, the map's or that in which it accumulates; statistics defined",
        _normalised,
    ),
    "batch_norm_update_stats.default": Kernel(
        "cuda/Normalization.cu: batch_norm_update_stats_cuda",
        "no running statistics, or float32 ones of 16-bit maps; slices of maps",
        "any strides (slices: var_mean_out, which widens and sums in one kernel); both running statistics or none",
        _statistics,
    ),
    "native_batch_norm_backward.default": Kernel(
        "cuda/Normalization.cu: batch_norm_backward_cuda, batch_norm_backward_reduce_cuda",
        "evaluation mode with batch statistics, a weight of ones, without the map's cotangent; no running statistics",
        "saved mean and inverse deviation defined, of the dtype in which the map accumulates; dtype of dy is the map's",
        _normalised_back,
    ),
    "batch_norm_backward_elemt.default": Kernel(
        "cuda/Normalization.cu: batch_norm_backward_elemt_cuda",
        "as torch's SyncBatchNorm; the pixels of the map in several numbers",
        "dtype of dy is the map's, all else of the dtype in which it accumulates; counts in 32 bits, which it adds up",
        _normalised_back_of_map,
    ),
    "batch_norm_elemt.default": Kernel(
        "cuda/Normalization.cu: batch_norm_elemt_cuda",
        "as torch's SyncBatchNorm, and without weight or bias",
        "weight and bias as native_batch_norm; mean and 1/σ of the dtype in which it accumulates; reads no epsilon",
        _normalised_by,
    ),
    "max_pool2d_with_indices.default": Kernel(
        "cuda/DilatedMaxPool2d.cu", "slices of maps", "any strides, copied to the memory format that they suggest"
    ),
    "max_pool2d_with_indices_backward.grad_input": Kernel(
        "cuda/DilatedMaxPool2d.cu",
        "a map without memory, of which only the shape is read; the map's own memory as output",
        "dtype of dy is the map's; strides of the output are ignored: it is written in the map's memory format",
        _pooled_back,
    ),
    "avg_pool2d.default": Kernel(
        "cuda/AveragePool2d.cu", "padded maps are contiguous", "any strides; its backward: see avg_pool2d_backward"
    ),
    "avg_pool2d_backward.grad_input": Kernel(
        "cuda/AveragePool2d.cu",
        "the output as map",
        "the same as max_pool2d_with_indices_backward; the padding of a channels-last map is forgotten",
        _averaged_back,
    ),
    "convolution.default": Kernel(
        "Convolution.cpp: _convolution", "slices of maps and kernels", "one dtype for map, kernel, bias", _convolved
    ),
    "convolution_backward.default": Kernel(
        "Convolution.cpp: convolution_backward",
        "masks; slices of maps and kernels",
        "one dtype for dy, map, kernel; what the mask leaves out is undefined",
        _convolved,
    ),
    "mul.out": Kernel("cuda/BinaryMulKernel.cu", "the cotangent's own memory as output", "as TensorIterator"),
    "_foreach_copy_.default": Kernel(
        "cuda/ForeachBinaryOpList.cu", "values of other dtypes and strides", "any: one by one where they differ"
    ),
    "_foreach_add_.List": Kernel("cuda/ForeachBinaryOpList.cu", "statistics in float32", "as many on both sides"),
    "_foreach_mul_.Scalar": Kernel("cuda/ForeachBinaryOpScalar.cu", "statistics in float32", "any"),
    "_foreach_mul_.Tensor": Kernel(
        "cuda/ForeachBinaryOpScalarTensor.cu", "a factor on the gradients' device", "one value on their device"
    ),
    "_assert_async.msg": Kernel(
        "cuda/TensorCompare.cu: _assert_async_msg_cuda",
        "whether all indices are in a map",
        "one value; a false one ends the process's use of the GPU, as an index outside of a tensor does",
    ),
    "threshold_backward.default": Kernel(),
    "threshold_backward.grad_input": Kernel("cuda/ActivationThresholdKernel.cu", "dy as output", "as TensorIterator"),
    **{
        name: Kernel()
        for name in (
            *("_native_batch_norm_legit.default", "instance_norm.default", "slice_scatter.default"),
            "upsample_nearest2d.default",
            *(
                "_upsample_nearest_exact2d.default",
                "alias.default",
                "copy.default",
                "_to_copy.default",
                "clone.default",
            ),
            *("reshape.default", "is_non_overlapping_and_dense.default", "squeeze.dims"),
            "unfold_backward.default",  # refused at capture: never called
        )
    },
}


WRONG = 0.1
"""Relative error of a result in bfloat16 that is not rounding."""
_COMPARED: Mapping[str, Callable[..., Any]] = {
    "aten.convolution.default": torch.ops.aten.convolution.default,
    "aten.convolution_backward.default": torch.ops.aten.convolution_backward.default,
    "aten.avg_pool2d_backward.default": torch.ops.aten.avg_pool2d_backward.default,
    "aten.avg_pool2d_backward.grad_input": torch.ops.aten.avg_pool2d_backward.default,
    "aten.max_pool2d_with_indices_backward.grad_input": torch.ops.aten.max_pool2d_with_indices_backward.default,
}
"""Convolutions and pools -> their operators without memory for the result."""


class CheckedCalls(TorchDispatchMode):
    """Fails at calls that CUDA would refuse; counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        self.calls[name] = self.calls.get(name, 0) + 1
        accepts = KERNELS.get(name, Kernel()).accepts
        assert accepts is None or accepts(*args, **(kwargs or {})), f"CUDA would refuse {name} of {_said(args)}"
        return func(*args, **(kwargs or {}))


class ComparedCalls(TorchDispatchMode):
    """Compares convolutions, their cotangents and those of pools on a GPU with float64 on the CPU.

    Attributes:
        wrong: descriptions of those that differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if str(func) in _COMPARED:
            # Of the map that a pool's cotangent has overwritten, only the shape is read.
            exact = _COMPARED[str(func)](*(_wide(one) if isinstance(one, torch.Tensor) else one for one in args))
            pairs = zip(tree_leaves(found), tree_leaves(exact), strict=True)
            errors = [
                float((one.cpu().double() - other).norm() / other.norm().clamp(min=1e-9))
                for one, other in pairs
                if one is not None
            ]
            if any(error > WRONG for error in errors):
                self.wrong.append(f"{func}: relative errors {errors} of {_said(args)}")
        return found


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().double() if tensor.is_floating_point() else tensor.cpu()


def _said(args: Any) -> list[Any]:
    return [(one.dtype, tuple(one.shape), one.stride()) if isinstance(one, torch.Tensor) else one for one in args]
