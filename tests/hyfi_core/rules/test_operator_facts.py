"""The records of operators, against what autograd does: one sample call for each operator with a fact of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hyfi_core.rules.operator_facts import OperatorFacts
from hyfi_core.rules.table import OPERATORS

aten = torch.ops.aten


def maps(*shape: int) -> torch.Tensor:
    """Return positive values that require gradients; no two are equal."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.rand(shape or (2, 4, 6, 6), generator=generator) + 0.5).requires_grad_()


def sizes(*numbers: int) -> list[int]:
    return list(numbers)


def statistics() -> tuple[Any, ...]:
    return maps(4), maps(4), torch.zeros(4), torch.ones(4)


# Text of an operator without ``aten.`` -> its arguments.
SAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    **dict.fromkeys(("relu", "neg", "clone", "contiguous", "exp", "sqrt", "rsqrt", "sigmoid"), lambda: (maps(),)),
    **dict.fromkeys(("tanh", "silu", "gelu", "hardswish", "hardsigmoid", "hardtanh"), lambda: (maps(),)),
    **dict.fromkeys(("leaky_relu", "elu", "alias", "squeeze", "mean", "sum"), lambda: (maps(),)),
    "to.dtype": lambda: (maps(), torch.float64),
    **dict.fromkeys(
        ["add.Tensor", "sub.Tensor", "rsub.Tensor", "mul.Tensor", "div.Tensor"], lambda: (maps(), maps(2, 4, 6, 6))
    ),
    **dict.fromkeys(["add.Scalar", "sub.Scalar", "rsub.Scalar", "mul.Scalar", "div.Scalar"], lambda: (maps(), 2.0)),
    "_to_copy": lambda: (maps(),),
    "clamp": lambda: (maps(), 0.6, 0.9),
    "detach": lambda: (maps(),),
    "conv1d": lambda: (maps(2, 4, 6), maps(5, 4, 3)),
    "conv1d.padding": lambda: (maps(2, 4, 6), maps(5, 4, 3), None, [1], "same"),
    "conv2d": lambda: (maps(), maps(5, 4, 3, 3), maps(5)),
    "conv2d.padding": lambda: (maps(), maps(5, 4, 3, 3), None, [1, 1], "same"),
    "conv_transpose2d.input": lambda: (maps(), maps(4, 5, 3, 3)),
    "linear": lambda: (maps(2, 4, 6, 5), maps(3, 5)),
    **dict.fromkeys(("matmul", "bmm"), lambda: (maps(2, 4, 6), maps(2, 6, 5))),
    "mm": lambda: (maps(4, 6), maps(6, 5)),
    "max_pool1d": lambda: (maps(2, 4, 6), [2]),
    "max_pool2d": lambda: (maps(), [2, 2]),
    "avg_pool1d": lambda: (maps(2, 4, 6), [2]),
    "avg_pool2d": lambda: (maps(), [2, 2]),
    "avg_pool3d": lambda: (maps(2, 1, 4, 6, 6), [3, 1, 1]),
    **dict.fromkeys(("adaptive_avg_pool2d", "adaptive_max_pool2d"), lambda: (maps(), [2, 2])),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_max_pool1d"), lambda: (maps(2, 4, 6), [2])),
    "batch_norm": lambda: (maps(), *statistics(), False, 0.1, 1e-5, False),
    "_native_batch_norm_legit_functional": lambda: (maps(), *statistics(), True, 0.1, 1e-5),
    "_native_batch_norm_legit_no_training": lambda: (maps(), *statistics(), 0.1, 1e-5),
    "_native_batch_norm_legit.no_stats": lambda: (maps(), *statistics()[:2], True, 0.1, 1e-5),
    "group_norm": lambda: (maps(), 2, maps(4), maps(4)),
    "instance_norm": lambda: (maps(), maps(4), maps(4), None, None, True, 0.1, 1e-5, False),
    "layer_norm": lambda: (maps(), [6], maps(6), maps(6)),
    "rms_norm": lambda: (maps(), [6], maps(6)),
    "cat": lambda: ([maps(), maps(2, 3, 6, 6)], 1),
    "stack": lambda: ([maps(), maps(2, 4, 6, 6)], 1),
    **dict.fromkeys(("split.Tensor", "chunk"), lambda: (maps(), 2, 1)),
    "split_with_sizes": lambda: (maps(), [1, 3], 1),
    **dict.fromkeys(("softmax.int", "log_softmax.int"), lambda: (maps(), 1)),
    **dict.fromkeys(("_softmax", "_log_softmax"), lambda: (maps(), 1, False)),
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), lambda: (maps(), sizes(2, 4, 36))),
    "permute": lambda: (maps(), sizes(0, 2, 3, 1)),
    "transpose.int": lambda: (maps(), 1, 2),
    "unsqueeze": lambda: (maps(), 1),
    "squeeze.dim": lambda: (maps(2, 1, 6, 6), 1),
    "squeeze.dims": lambda: (maps(2, 1, 6, 6), [1]),
    "select.int": lambda: (maps(), 1, 2),
    "unbind.int": lambda: (maps(), 1),
    "slice.Tensor": lambda: (maps(), 2, 1, 5),
    "expand": lambda: (maps(2, 4, 1, 1), sizes(2, 4, 6, 6)),
    **dict.fromkeys(("mean.dim", "sum.dim_IntList"), lambda: (maps(), [2, 3])),
    "repeat": lambda: (maps(), sizes(1, 2, 1, 1)),
    "tile": lambda: (maps(), sizes(1, 2, 1, 1)),
    "roll": lambda: (maps(), [1], [2]),
    "flip": lambda: (maps(), [2]),
    "pad": lambda: (maps(), [1, 1, 1, 1]),
    "constant_pad_nd": lambda: (maps(), [1, 1, 1, 1]),
    "pixel_shuffle": lambda: (maps(), 2),
    "pixel_unshuffle": lambda: (maps(), 2),
    "im2col": lambda: (maps(), [2, 2], [1, 1], [0, 0], [1, 1]),
    "unfold": lambda: (maps(), 2, 2, 1),
    **dict.fromkeys(("upsample_nearest2d.vec", "_upsample_nearest_exact2d.vec"), lambda: (maps(), sizes(12, 12), None)),
    **dict.fromkeys(
        (
            *("upsample_bilinear2d.vec", "upsample_bicubic2d.vec"),
            *("_upsample_bilinear2d_aa.vec", "_upsample_bicubic2d_aa.vec"),
        ),
        lambda: (maps(), sizes(12, 12), False, None),
    ),
    "scaled_dot_product_attention": lambda: (maps(2, 4, 6, 8), maps(2, 4, 6, 8), maps(2, 4, 6, 8)),
}
WITHOUT_GRADIENT = {"detach"}


def text_of(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


def target(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Call:
    """A call of an operator, and what autograd keeps of it.

    Attributes:
        inputs: tensors that require gradients.
        outputs: results.
        kept: memory of the tensors that autograd keeps.
        indices: whether integers are among them.
    """

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        flat = [item for part in arguments for item in (part if isinstance(part, list) else [part])]
        self.inputs = [item for item in flat if isinstance(item, torch.Tensor) and item.requires_grad]
        self._saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
            results = target(name)(*arguments)
        results = [results] if isinstance(results, torch.Tensor) else list(results)
        self.outputs = [item for item in results if isinstance(item, torch.Tensor) and item.is_floating_point()]
        self.kept = {memory(tensor) for tensor in self._saved}
        self.indices = any(tensor.dtype == torch.int64 for tensor in self._saved)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._saved.append(tensor)
        return tensor

    def keeps_input(self) -> bool:
        return memory(self.inputs[0]) in self.kept

    def keeps_output(self) -> bool:
        return memory(self.outputs[0]) in self.kept


def test_every_fact_has_a_sample() -> None:
    """A record that says more than its rule is checked below; an operator without facts needs no sample."""
    ours = {text: one for text, one in OPERATORS.items() if not text.startswith("hyfi_benchmarks.")}  # added by these
    facts = {text for text, one in ours.items() if one.rule is not None and one != OperatorFacts(one.rule)}
    assert facts == {text_of(name) for name in SAMPLES}


@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - WITHOUT_GRADIENT))
def test_autograd_keeps_what_the_record_says(name: str) -> None:
    call, keeps = Call(name, SAMPLES[name]()), OPERATORS[text_of(name)].keeps
    if OPERATORS[text_of(name)].kind == "view":
        assert memory(call.inputs[0]) == memory(call.outputs[0]) or name in ("_unsafe_view",)
        assert not call.keeps_input()
        return
    assert call.keeps_input() == (keeps in ("inputs", "inputs and outputs", "inputs and places", "other factors"))
    assert call.keeps_output() == (keeps in ("outputs", "inputs and outputs"))
    assert call.indices == (keeps == "inputs and places")


@pytest.mark.parametrize("name", [name for name in SAMPLES if OPERATORS[text_of(name)].keeps == "other factors"])
def test_a_factor_is_kept_for_the_gradient_of_the_other(name: str) -> None:
    first, second = SAMPLES[name]()
    call = Call(name, (first, second.detach()))
    assert memory(second) in call.kept and memory(first) not in call.kept


@pytest.mark.parametrize("name", [name for name in SAMPLES if OPERATORS[text_of(name)].gradient != "any"])
def test_the_memory_of_a_gradient(name: str) -> None:
    call = Call(name, SAMPLES[name]())
    incoming = torch.ones_like(call.outputs[0])
    (gradient,) = torch.autograd.grad(call.outputs[0], call.inputs[0], incoming)
    assert (memory(gradient) == memory(incoming)) == (OPERATORS[text_of(name)].gradient == "same")


@pytest.mark.parametrize("name", [name for name in SAMPLES if OPERATORS[text_of(name)].fresh])
def test_a_fresh_result_is_new_memory_that_nobody_reads(name: str) -> None:
    call = Call(name, SAMPLES[name]())
    assert not call.keeps_output()
    assert all(memory(call.outputs[0]) != memory(tensor) for tensor in call.inputs)


def test_results_of_convolutions_norms_and_sums_may_be_overwritten() -> None:
    """Without this an activation after a batch norm takes memory of its own, with the same values."""
    norms = {text for text, one in OPERATORS.items() if one.kind == "norm" and one.rule}
    batch_norms = {text for text in norms if "batch_norm" in text}
    others = {"aten.add.Tensor", "aten.conv2d.default", "aten.conv2d.padding"}
    assert {text for text, one in OPERATORS.items() if one.fresh} == batch_norms | others


def test_derived_facts() -> None:
    addition = OPERATORS["aten.add.Tensor"]
    assert addition.passes_on and addition.fusible and not addition.product
    assert not replace(addition, in_place=False, gradient="any").passes_on
    assert OPERATORS["aten.view.default"].passes_on and not OPERATORS["aten.view.default"].fusible
    assert OPERATORS["aten.conv2d.default"].product and not OPERATORS["aten.conv2d.default"].fusible
