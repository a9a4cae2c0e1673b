"""Optimizer states by parameter name: a state of another model is refused with both numbers of parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.runtime.ownership import load_optimizer_state, optimizer_state


def test_a_state_of_another_model_is_refused_with_both_numbers() -> None:
    saved_of, loaded_into = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    saved = optimizer_state(torch.optim.SGD(saved_of.parameters(), 0.1), saved_of.named_parameters())
    optimizer = torch.optim.SGD(loaded_into.parameters(), 0.1)
    with pytest.raises(RequestError, match="2 saved, 4 now; resume with the same model"):
        load_optimizer_state(optimizer, loaded_into.named_parameters(), saved)
