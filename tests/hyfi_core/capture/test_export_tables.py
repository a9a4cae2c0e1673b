"""Tables that are remembered are those that would have been made, and PyTorch's class is left as it was."""

from __future__ import annotations

import torch
from torch import nn
from torch.export.graph_signature import ExportGraphSignature

from hyfi_core.capture.export_tables import remembered_tables

MAPPINGS = ("inputs_to_parameters", "inputs_to_buffers", "buffers_to_mutate")
NAMES = (*MAPPINGS, "parameters", "buffers")


def tables(signature: ExportGraphSignature) -> list[dict[str, str] | list[str]]:
    found = [getattr(signature, name) for name in NAMES]
    return [dict(table) if isinstance(table, dict) else list(table) for table in found]


def test_tables_are_made_once_and_again_after_a_renaming() -> None:
    before = [ExportGraphSignature.__dict__[name] for name in NAMES]
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2))
    with remembered_tables():
        exported = torch.export.export(model, (torch.zeros(1, 3, 4, 4),), strict=False).run_decompositions({})
        signature = exported.graph_signature
        assert signature.inputs_to_parameters is signature.inputs_to_parameters
        assert signature.buffers is signature.buffers
        first = tables(signature)
        name = next(iter(first[0]))
        signature.replace_all_uses(name, "other")
        second = tables(signature)
    assert [ExportGraphSignature.__dict__[name] for name in NAMES] == before
    assert second == tables(signature) and "other" in second[0]
    signature.replace_all_uses("other", name)
    assert first == tables(signature) and all(first)
