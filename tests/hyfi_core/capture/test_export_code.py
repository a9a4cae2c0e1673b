"""Code that waits is the code that would have been made, and PyTorch's class is left as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn

from hyfi_core.capture.export_code import code_when_run


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def waits(module: fx.GraphModule) -> bool:
    return "_code" not in vars(module)


def test_code_is_made_at_the_first_look_and_is_that_of_the_graph_as_it_is_then() -> None:
    plain = fx.GraphModule.recompile
    expected = fx.symbolic_trace(Sum()).code
    with code_when_run():
        assert fx.GraphModule.recompile is not plain
        traced = fx.symbolic_trace(Sum())
        assert waits(traced)
        assert traced(torch.zeros(1)).item() == 1
        assert not waits(traced)
        assert traced.code == expected
        next(node for node in traced.graph.nodes if node.op == "call_function").args = (
            next(iter(traced.graph.nodes)),
            2,
        )
        traced.recompile()
        assert waits(traced)
    assert fx.GraphModule.recompile is plain
    assert traced(torch.zeros(1)).item() == 2
    assert traced.code != expected


def test_what_was_made_meanwhile_can_be_copied_and_made_anew_later() -> None:
    with code_when_run():
        traced = fx.symbolic_trace(nn.Sequential(Sum(), nn.Identity()))
    twin = copy.deepcopy(traced)
    traced.recompile()
    assert not waits(traced)
    assert traced(torch.zeros(1)).item() == twin(torch.zeros(1)).item() == 1


def test_how_arguments_are_put_together_is_known_at_once() -> None:
    image = torch.zeros(1, 3, 4, 4)
    plain = torch.export.export(nn.Conv2d(3, 2, 1), (image,), strict=False).module()
    with code_when_run():
        module = torch.export.export(nn.Conv2d(3, 2, 1), (image,), strict=False).module()
        assert isinstance(module, fx.GraphModule) and isinstance(plain, fx.GraphModule)
        assert module._in_spec == plain._in_spec and module._out_spec == plain._out_spec
        assert module(image).shape == (1, 2, 4, 4)
    assert module.code == plain.code


def test_a_pytorch_that_makes_it_otherwise_goes_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fx.GraphModule.recompile

    def other(module: Any) -> Any:
        module._what_else = True
        return plain(module)

    monkeypatch.setattr(fx.GraphModule, "recompile", other)
    with code_when_run():
        assert fx.GraphModule.recompile is other
        assert not waits(fx.symbolic_trace(Sum()))
    monkeypatch.delattr(fx.graph, "_PyTreeCodeGen")
    with code_when_run():
        assert fx.GraphModule.recompile is other
