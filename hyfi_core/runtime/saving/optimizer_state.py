"""The state of an optimizer by parameter *name*, so that it is valid for any plan and process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from hyfi_core.errors import RequestError
from hyfi_core.runtime.saving.weight_shards import is_shard, shard_like

_GRADIENT = "accumulated gradient"
"""Key of a gradient among the state of its parameter."""


def optimizer_state(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]], gradients: bool = False
) -> dict[str, Any]:
    """Return the optimizer state by parameter *name*, so that it is valid for any plan.

    Args:
        optimizer: an optimizer of parameters in ``named``.
        named: the model's ``named_parameters()``.
        gradients: whether to add the gradients accumulated for the next update.

    Returns:
        ``{"tensors": {"<name>/<key>": tensor}, "groups": [{hyper-parameters, "names": [...], "values": {...}}]}``;
        ``values`` has the entries that are not tensors. Tensors are not copied.
    """
    names = {id(parameter): name for name, parameter in named}
    tensors: dict[str, torch.Tensor] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        values: dict[str, dict[str, Any]] = {}
        named_here = [p for p in group["params"] if id(p) in names]  # a rank without parameters has a placeholder
        for parameter in named_here:
            name = names[id(parameter)]
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}/{key}"] = value
                else:
                    values.setdefault(name, {})[key] = value
            if gradients and parameter.grad is not None:
                tensors[f"{name}/{_GRADIENT}"] = parameter.grad
        hyper = {key: value for key, value in group.items() if key != "params"}
        groups.append({**hyper, "names": [names[id(p)] for p in named_here], "values": values})
    return {"tensors": tensors, "groups": groups}


def restricted(saved: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the part of an ``optimizer_state`` for some parameters; its tensors have keys ``<name>/<key>``."""
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


def check_groups(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]], saved: Mapping[str, Any]
) -> None:
    """Check that an optimizer has the parameter groups of an ``optimizer_state``, or this rank's part of them.

    Args:
        optimizer: the optimizer.
        named: the model's ``named_parameters()``.
        saved: the ``optimizer_state``.

    Raises:
        RequestError: it does not.
    """
    names, groups = {id(parameter): name for name, parameter in named}, saved["groups"]
    own_names = [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]
    if len(own_names) == len(groups) and all(
        set(mine) <= set(group["names"]) for mine, group in zip(own_names, groups, strict=True)
    ):
        return
    raise RequestError(
        "the checkpoint's optimizer has other parameters or groups of them than this one: "
        f"{sum(len(group['names']) for group in groups)} in {len(groups)} saved, {sum(map(len, own_names))} in "
        f"{len(own_names)} now; resume with the same model and the same groups"
    )


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, torch.nn.Parameter]],
    saved: Mapping[str, Any],
) -> None:
    """Load an ``optimizer_state`` into ``optimizer`` and, if it has gradients, its parameters, by parameter name.

    Raises:
        RequestError: parameters or groups differ from the saved ones.
    """
    named = list(named)
    check_groups(optimizer, named, saved)
    names, groups = {id(parameter): name for name, parameter in named}, saved["groups"]
    entries: dict[str, list[str]] = {}  # name of a parameter -> keys ``<name>/<key>`` of its tensors
    for key in saved["tensors"]:
        entries.setdefault(key.rpartition("/")[0], []).append(key)
    for group, saved_group in zip(optimizer.param_groups, groups, strict=True):
        # All settings, but not the parameters: the group keeps its own, to which the saved names refer.
        group.update(
            {
                key: _restored(group.get(key), value)
                for key, value in saved_group.items()
                if key not in ("names", "values")
            }
        )
        for parameter in group["params"]:
            if id(parameter) not in names:  # the placeholder of a rank without parameters
                continue
            name = names[id(parameter)]
            state = dict(saved_group["values"].get(name, {}))
            for entry in entries.get(name, ()):  # other entries are not read from the file
                key = entry.rpartition("/")[2]
                if key == _GRADIENT:
                    parameter.grad = _like(parameter, saved["tensors"][entry])
                    continue
                # As in torch: where kernels use the number of steps it is on the device, otherwise on the host.
                on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
                value = saved["tensors"][entry]
                state[key] = value.clone() if on_host else _like(parameter, value)
            if state:
                optimizer.state[parameter] = state


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``value`` on its parameter's device; of equal shape, with the parameter's strides."""
    if value.shape != parameter.shape:  # as Adafactor's moments of rows and columns
        return value.to(parameter.device, copy=True)
    if is_shard(parameter):
        return shard_like(parameter, value)
    # In the parameter's strides: optimizers are slower if the two differ. The moments may have a dtype of their own.
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _restored(current: Any, saved: Any) -> Any:
    """Return ``saved`` in the type that the optimizer uses: JSON has no tuples."""
    return tuple(saved) if isinstance(current, tuple) and isinstance(saved, list) else saved
