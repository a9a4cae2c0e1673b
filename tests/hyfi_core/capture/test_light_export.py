"""Light exports give the same programs as plain ones, and leave PyTorch as it was."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import traceback
from torch.fx.experimental import symbolic_shapes

from hyfi_core.capture import export as module
from hyfi_core.capture.export import capture
from hyfi_core.capture.light_export import light_export
from hyfi_core.capture.program import Program
from hyfi_core.errors import RequestError
from hyfi_core.models.amoebanet import FactorizedReduction
from hyfi_core.models.resnet import resnet_v2

unflatten = importlib.import_module("torch.export.unflatten")  # a function has the same name


class Tokens(nn.Module):
    """Attention, dropout, layer norm, a weight used twice, a constant, a buffer that counts, a dict as the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, "gelu", batch_first=True)
        self.head = self.tied = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.seen += 1
        y = self.layer(self.patch(x).flatten(2).transpose(1, 2))
        return {"logits": self.tied(self.head(y).mean(1)), "scale": y[:, 0] * torch.tensor([2.0])}


def cumulative() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4, momentum=None), nn.ReLU(inplace=True), nn.AvgPool2d(3)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet_v2": lambda: resnet_v2(11, classes=2),
    "evaluation": lambda: resnet_v2(11, classes=2).eval(),
    "reduction": lambda: FactorizedReduction(3, 8),
    "tokens": Tokens,
    "cumulative": cumulative,
}


def everything(program: Program) -> list[str]:
    """Return all that a program says, as text."""
    answer = program.unflatten(list(program.outputs))
    fields = (program.values, program.parameters, program.buffers, program.constants, program.mutations)
    return [program.digest(), *(str(list(field.items())) for field in fields), program.image, str(answer)]


@pytest.mark.parametrize("name", MODELS)
def test_programs_are_those_of_a_plain_export(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape = MODELS[name](), (2, 3, 64, 64)
    light = capture(model, shape, torch.float32)
    monkeypatch.setattr(module, "light_export", contextlib.nullcontext)
    assert everything(light) == everything(capture(model, shape, torch.float32))


def state() -> list[Any]:
    """Return what a light export changes of PyTorch and of Python."""
    return [
        dict(vars(ExportGraphSignature)),
        torch.fx.GraphModule.recompile,
        getattr(getattr(torch.fx, "config", None), "do_not_emit_stack_traces", None),
        vars(getattr(traceback, "NodeSource", object)).get("__deepcopy__"),
        getattr(symbolic_shapes, "_free_unbacked_symbols_with_path", None),
        getattr(unflatten, "_is_call_name", None),
        gc.get_threshold(),
    ]


def test_everything_is_put_back_after_a_failure_too() -> None:
    before = state()
    with contextlib.suppress(KeyError), light_export():
        during = state()
        raise KeyError
    assert state() == before
    assert all(a != b for a, b in zip(before, during, strict=True) if a is not None)

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(RequestError, match="cannot be captured"):
        capture(Fails(), (1, 3, 8, 8), torch.float32)
    assert state() == before


def test_a_pytorch_without_what_is_made_lighter_goes_the_slow_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape = resnet_v2(11, classes=2), (1, 3, 32, 32)
    expected = everything(capture(model, shape, torch.float32))
    before = dict(vars(ExportGraphSignature))
    monkeypatch.delattr(torch.fx.config, "do_not_emit_stack_traces", raising=False)
    monkeypatch.setattr("hyfi_core.capture.export_tables._TABLES", ("no_such_table",))
    monkeypatch.setattr("hyfi_core.capture.export_code._CODE", ("forward",))
    for holder, name in ((traceback, "NodeSource"), (unflatten, "_is_call_name")):
        monkeypatch.delattr(holder, name, raising=False)
    with light_export():
        assert not hasattr(torch.fx.config, "do_not_emit_stack_traces")
        assert not hasattr(unflatten, "_is_call_name")
        assert not hasattr(traceback, "NodeSource")
        assert all(vars(ExportGraphSignature)[name] is before[name] for name in before if name != "replace_all_uses")
    monkeypatch.undo()
    assert everything(capture(model, shape, torch.float32)) == expected


def test_names_of_later_calls_and_empty_searches_are_answered_as_before() -> None:
    names = ["a", "a@1", "a@12", "a@", "ab", "a.b", "a1", "a@1b", "b", ""]
    asked = [(name, base) for name in names for base in ("a", "a.b", "b", "")]
    plain = [unflatten._is_call_name(*pair) for pair in asked]
    search = symbolic_shapes._free_unbacked_symbols_with_path
    with torch._subclasses.fake_tensor.FakeTensorMode():
        value = (torch.empty(2, 3), torch.empty(()))
    with light_export():
        assert [unflatten._is_call_name(*pair) for pair in asked] == plain
        assert symbolic_shapes._free_unbacked_symbols_with_path(value, (), pending=set()) == {}
    assert search(value, (), pending=set()) == {}
