from __future__ import annotations

import pytest
import torch

from hyfi_core.runtime.saving.optimizer_state import load_optimizer_state, optimizer_state

# The meta device stands for a GPU: all that is asked here is on which of two devices a tensor is.


def trained(make: type[torch.optim.Optimizer]) -> dict[str, object]:
    model = torch.nn.Linear(4, 3)
    optimizer = make(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer_state(optimizer, model.named_parameters())


def loaded(make: type[torch.optim.Optimizer], saved: dict[str, object]) -> dict[str, torch.Tensor]:
    model = torch.nn.Linear(4, 3, device="meta")
    optimizer = make(model.parameters(), lr=0.01)
    load_optimizer_state(optimizer, model.named_parameters(), saved)
    return {key: value for key, value in optimizer.state[model.weight].items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("setting", [None, "fused", "capturable"])
def test_steps_are_counted_where_the_optimizer_does(setting: str | None) -> None:
    saved = trained(torch.optim.AdamW)
    if setting is not None:
        saved["groups"][0][setting] = True  # type: ignore[index]
    state = loaded(torch.optim.AdamW, saved)
    assert state["step"].device.type == ("cpu" if setting is None else "meta")
    assert state["exp_avg"].device.type == "meta"


def test_moments_of_another_shape_are_on_the_device_of_the_weight() -> None:
    state = loaded(torch.optim.Adafactor, trained(torch.optim.Adafactor))
    assert {key: tuple(state[key].shape) for key in ("row_var", "col_var")} == {"row_var": (3, 1), "col_var": (1, 4)}
    assert {state[key].device.type for key in ("row_var", "col_var")} == {"meta"}
    assert state["step"].device.type == "cpu"
