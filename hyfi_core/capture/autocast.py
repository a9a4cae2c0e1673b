"""Dtypes of values under autocast, computed in advance: for ranks that receive values or have none, and forecasts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hyfi_core.capture.program import Program, refs_in, substitute

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)


def under_autocast(program: Program, dtype: torch.dtype, device: str) -> Program:
    """Return the program with the dtypes that its values have under autocast; see ``dtypes_under_autocast``."""
    dtypes = dtypes_under_autocast(program, dtype, device)
    values = {name: replace(info, dtype=dtypes.get(name, info.dtype)) for name, info in program.values.items()}
    return replace(program, values=values)


def dtypes_under_autocast(program: Program, dtype: torch.dtype, device: str) -> Mapping[str, torch.dtype]:
    """Return the dtype of each value when the program runs under autocast; nothing is computed.

    Args:
        program: the captured model.
        dtype: dtype of autocast.
        device: device type; autocast differs between device types.
    """
    # Fake tensors follow the rules of autocast without memory, also for a device that this machine lacks.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast(device, dtype), torch.no_grad():
        computed = {op_output for op in program.operators for op_output in op.outputs}
        values = {
            name: torch.empty(info.shape, dtype=info.dtype, device=device)
            for name, info in program.values.items()
            if name not in computed
        }
        alive = program.needed({*refs_in(program.outputs), *program.mutations.values()})
        for op in program.operators:
            if not any(output in alive for output in op.outputs):
                continue  # no rank executes it, such as a check of dtypes that holds without autocast only
            kwargs = {key: substitute(item, values) for key, item in op.kwargs.items()}
            if kwargs.get("device") is not None:  # the device of capture; dtypes do not depend on it
                kwargs["device"] = torch.device(device)
            # Strides may differ from those at capture, for example in attention: a view may not exist.
            target = aten.reshape.default if op.target in _VIEWS else op.target
            results = target(*substitute(op.args, values), **kwargs)
            if isinstance(results, torch.Tensor):
                results = (results,)
            # Not strict: an operator may have more results than are used.
            values.update((n, r) for n, r in zip(op.outputs, results, strict=False) if n is not None)
    return {name: value.dtype for name, value in values.items()}
