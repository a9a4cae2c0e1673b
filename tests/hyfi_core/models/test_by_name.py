"""Tests of models by name: the arguments with which a factory of the user is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.models.by_name import build_model, unused_keys

HERE = "tests.hyfi_core.models.test_by_name"


class Recorded(nn.Linear):
    """A module that keeps the keyword arguments of its factory."""

    def __init__(self, classes: int, arguments: dict[str, Any]) -> None:
        super().__init__(3, classes)
        self.arguments = arguments


def any_keywords(classes: int, **kwargs: Any) -> nn.Module:
    return Recorded(classes, kwargs)


def pool_only(classes: int, pool: str = "avg", width: int = 8) -> nn.Module:
    return Recorded(classes, {"pool": pool, "width": width})


def test_keywords_get_no_argument_that_nobody_set() -> None:
    model: dict[str, Any] = {"name": f"{HERE}:any_keywords", "classes": 2, "norm": "train", "pool": "avg"}
    assert build_model(model).arguments == {}
    assert build_model(model | {"options": {"depth": 3}}).arguments == {"depth": 3}
    assert build_model(model | {"norm": "group"}).arguments == {"norm": "group"}
    assert unused_keys(model | {"norm": "group"}) == []


def downloads(classes: int) -> nn.Module:
    raise ConnectionError("no route\nto pretrained.example")


def test_a_factory_that_cannot_read_its_weights_is_named() -> None:
    """The message of a checkpoint used on another machine named a file, but neither model nor factory."""
    with pytest.raises(RequestError, match=r"model .*:downloads: the factory cannot .*Error: no route to pre"):
        build_model({"name": f"{HERE}:downloads", "classes": 2})


def of_a_library(num_classes: int) -> nn.Module:
    return nn.Linear(3, num_classes)


def test_a_factory_without_the_parameter_classes_is_refused_with_advice() -> None:
    with pytest.raises(RequestError, match="argument 'classes'; name a function of your own that takes classes"):
        build_model({"name": f"{HERE}:of_a_library", "classes": 2})


def scripted(classes: int) -> nn.Module:
    return torch.jit.script(nn.Linear(3, classes))


def test_a_program_of_torchscript_is_refused_with_advice() -> None:
    with pytest.raises(RequestError, match=r"scripted returned a program of TorchScript.*return the module from which"):
        build_model({"name": f"{HERE}:scripted", "classes": 2})


def test_named_parameters_always_get_theirs() -> None:
    model: dict[str, Any] = {"name": f"{HERE}:pool_only", "classes": 2, "norm": "train", "pool": "avg"}
    assert build_model(model | {"pool": "max"}).arguments == {"pool": "max", "width": 8}
    assert build_model(model | {"norm": "group"}).arguments == {"pool": "avg", "width": 8}
    assert unused_keys(model | {"norm": "group", "pool": "max"}) == ["norm"]
    assert unused_keys(model) == []
    with pytest.raises(RequestError, match=r"model.options.depth: .* does not take it; it takes classes, pool, width"):
        build_model(model | {"options": {"depth": 3}})
