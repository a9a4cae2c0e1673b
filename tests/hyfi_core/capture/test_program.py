"""Operators: what follows from their parts follows anew when they are changed."""

from __future__ import annotations

from dataclasses import replace

import torch

from hyfi_core.capture.program import Operator, Ref


def test_name_and_inputs_follow_from_target_and_arguments() -> None:
    aten = torch.ops.aten
    args = (Ref("a"), [Ref("b"), (Ref("a"), 2)])
    op = Operator("cat", aten.cat.default, args, {"other": Ref("c")}, ("cat",), "layer")
    assert op.text == "aten.cat.default"
    assert op.inputs == ("a", "b", "a", "c")
    other = replace(op, target=aten.add.Tensor, args=(Ref("x"), 1), kwargs={})
    assert (other.text, other.inputs) == ("aten.add.Tensor", ("x",))
    assert "inputs" not in repr(op)
