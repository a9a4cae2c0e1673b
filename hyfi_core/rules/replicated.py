"""The rule for operators on values that every rank holds whole: all compute the same."""

from __future__ import annotations

from dataclasses import replace

import torch

from hyfi_core.capture.program import Operator
from hyfi_core.rules.batch_norm import batch_norm_alone, batch_norm_on_features
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import bound


def replicated(builder: Builder, op: Operator) -> None:
    """No map left: every rank of the stage computes the same, on the same values."""
    if draws_numbers(op) and builder.grid != (1, 1):
        builder.refuse(
            op, "draws random numbers, which ranks would draw differently", "dropout, bernoulli, rand, randn, or none"
        )
    if builder.replicas > 1 and op.text.startswith("aten._native_batch_norm_legit"):
        builder.refuse(
            op, "normalises features without space, which plan.sync_batch_norm does not", "sync_batch_norm=False"
        )
    if op.text == "aten._native_batch_norm_legit_functional.default":
        function, inputs = batch_norm_on_features(builder.program, op)
    elif op.text == "aten._native_batch_norm_legit.no_stats":
        function, inputs = batch_norm_alone(op)
    elif op.text in ("aten.view.default", "aten._unsafe_view.default"):
        # Values may lie otherwise in memory here than where the model was captured, attention's for one.
        function, inputs = bound(replace(op, target=torch.ops.aten.reshape.default))
    else:
        function, inputs = bound(op)
    builder.compute(function, inputs, op.outputs)


def draws_numbers(op: Operator) -> bool:
    """Whether the operator takes numbers from a generator; attention does only where it drops something."""
    tags = getattr(op.target, "tags", ())
    if op.text == "aten.scaled_dot_product_attention.default":
        return bool(op.args[4] if len(op.args) > 4 else op.kwargs.get("dropout_p", 0.0))
    return torch.Tag.nondeterministic_seeded in tags
