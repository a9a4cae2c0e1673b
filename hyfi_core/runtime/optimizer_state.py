"""An optimiser's state by parameter *name*, so that it fits any plan and any process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hyfi_core.errors import RequestError


def optimizer_state(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]]
) -> dict[str, Any]:
    """Return the optimiser's state by parameter *name*, so that it fits any plan.

    Args:
        optimizer: whose parameters are among ``named``.
        named: the model's ``named_parameters()``.

    Returns:
        ``{"tensors": {"<name>/<key>": tensor}, "groups": [{hyper-parameters, "names": [...], "values": {...}}]}``;
        ``values`` holds the entries that are not tensors. The tensors are the optimiser's own, not copies.
    """
    names = {id(parameter): name for name, parameter in named}
    tensors: dict[str, torch.Tensor] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        values: dict[str, dict[str, Any]] = {}
        named_here = [p for p in group["params"] if id(p) in names]  # a rank of bare stages has a placeholder
        for parameter in named_here:
            name = names[id(parameter)]
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}/{key}"] = value
                else:
                    values.setdefault(name, {})[key] = value
        hyper = {key: value for key, value in group.items() if key != "params"}
        groups.append({**hyper, "names": [names[id(p)] for p in named_here], "values": values})
    return {"tensors": tensors, "groups": groups}


def restricted(saved: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return what ``optimizer_state`` returned of some parameters only."""
    return {
        "tensors": {key: t for key, t in saved["tensors"].items() if key.rpartition("/")[0] in names},
        "groups": [
            {
                **group,
                "names": [name for name in group["names"] if name in names],
                "values": {name: value for name, value in group["values"].items() if name in names},
            }
            for group in saved["groups"]
        ],
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, torch.nn.Parameter]],
    saved: Mapping[str, Any],
) -> None:
    """Give ``optimizer`` what ``optimizer_state`` saved; parameters are found by name.

    Raises:
        RequestError: the optimiser has other parameters or other groups than the saved one.
    """
    names = {id(parameter): name for name, parameter in named}
    groups = saved["groups"]
    here = [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]
    if len(here) != len(groups) or any(
        not set(mine) <= set(group["names"]) for mine, group in zip(here, groups, strict=True)
    ):
        raise RequestError(
            "the checkpoint's optimiser holds other parameters than the model's: "
            f"{sum(len(group['names']) for group in groups)} saved, {sum(map(len, here))} now; "
            "resume with the same model"
        )
    for group, wanted in zip(optimizer.param_groups, groups, strict=True):
        group.update(
            {key: _restored(group.get(key), value) for key, value in wanted.items() if key not in ("names", "values")}
        )
        for parameter in group["params"]:
            if id(parameter) not in names:
                continue
            name = names[id(parameter)]
            state = dict(wanted["values"].get(name, {}))
            for key, value in saved["tensors"].items():
                owner, _, entry = key.rpartition("/")
                if owner == name:
                    state[entry] = _like(parameter, value)
            if state:
                optimizer.state[parameter] = state


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``value`` where the optimiser wants it: beside its parameter, in the parameter's strides."""
    if value.shape != parameter.shape:
        return value.clone()  # counters stay on the host
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _restored(current: Any, saved: Any) -> Any:
    """Return ``saved`` in the type that the optimiser uses: JSON knows no tuples."""
    return tuple(saved) if isinstance(current, tuple) and isinstance(saved, list) else saved


def made_optimizer(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the optimiser that the user's function makes of these parameters.

    Raises:
        RequestError: it returns none, or one whose step evaluates the model itself.
    """
    optimizer = make(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RequestError(
            f"optimizer returned {type(optimizer).__name__}; it must return a torch.optim.Optimizer of the parameters "
            "that it is given"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RequestError(
            f"{type(optimizer).__name__} evaluates the model several times within one step (a closure), which ranks do "
            "not do together; use an optimiser of gradients, such as SGD, Adam or AdamW"
        )
    return optimizer
