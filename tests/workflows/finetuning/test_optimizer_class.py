"""Optimizers by name, and of the user."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hyfi_core.errors import RequestError
from workflows.config.learning import OptimizerConfig
from workflows.finetuning.optimizer_class import optimizer_of
from workflows.finetuning.optimizers.lamb import Lamb
from workflows.finetuning.optimizers.lion import Lion
from workflows.finetuning.optimizers.schedule_free import ScheduleFreeAdamW

HERE = "tests.workflows.finetuning.test_optimizer_class"


class BeginsInEvaluation(torch.optim.SGD):
    """Has other weights for evaluation, and must be switched to training first, as those of schedulefree."""

    trains = False

    def eval(self) -> None:
        self.trains = False

    def train(self) -> None:
        self.trains = True


def not_an_optimizer(params: Any, lr: float, weight_decay: float = 0.0) -> int:
    return 3


def made(**config: Any) -> torch.optim.Optimizer:
    group = {"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5, "weight_decay": 0.0}
    return optimizer_of(OptimizerConfig(**config))([group], 0.1)


def test_names_are_classes_of_torch_with_the_keys_of_the_section() -> None:
    for name, kind in (("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("AdamW", torch.optim.AdamW)):
        assert type(made(name=name)) is kind
    for name, own in (("LAMB", Lamb), ("Lion", Lion), ("schedule-free", ScheduleFreeAdamW)):
        assert type(made(name=name)) is own
    assert made(name="lion").defaults["betas"] == (0.9, 0.99)
    assert made(name="schedulefree_sgd", momentum=0.4).param_groups[0]["beta"] == 0.4
    assert made(name="sgd", momentum=0.3, options={"nesterov": True}).defaults["nesterov"]
    assert made(name="adam", betas=(0.5, 0.6)).defaults["betas"] == (0.5, 0.6)


def test_a_class_of_the_user_is_made_with_its_options() -> None:
    optimizer = made(name="torch.optim:RMSprop", options={"alpha": 0.7})
    assert isinstance(optimizer, torch.optim.RMSprop) and optimizer.param_groups[0]["alpha"] == 0.7
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_one_with_other_weights_for_evaluation_begins_in_training() -> None:
    optimizer = made(name=f"{HERE}:BeginsInEvaluation")
    assert isinstance(optimizer, torch.optim.Optimizer) and optimizer.trains  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"name": "torch.optim:Missing"}, "'torch.optim:Missing': torch.optim has no 'Missing'"),
        ({"name": "no_such_module:Lion"}, "'no_such_module:Lion': .*PYTHONPATH"),
        ({"name": "schedulefree", "betas": (0.0, 0.9)}, "cannot be made .* between 0 and 1"),
        ({"name": f"{HERE}:not_an_optimizer"}, "returned int, not a torch.optim.Optimizer"),
        ({"options": {"nesterov": True}}, "optimizer.options.nesterov: adamw does not take it; it takes betas"),
        ({"name": "torch.optim:Rprop", "weight_decay": 0.1}, "Rprop has no weight decay"),
        ({"options": {"lr": 3}}, "optimizer.options.lr: "),
    ],
)
def test_other_classes_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        made(**config)
