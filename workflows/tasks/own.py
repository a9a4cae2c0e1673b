"""Losses and metrics of the user, named ``package.module:function`` in a configuration.

::

    loss(outputs (B, K), labels)   -> tensor without dims      over the whole batch, of all micro-batches and replicas
    metric(outputs (N, K), labels) -> number, higher: better   over all slides that are evaluated, or all their cases

Outputs are those of the model, for a regression in the units of the labels. Labels are what ``Task.tensor`` returns.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hyfi_core.capture.loss_guard import LossGuard
from hyfi_core.errors import RequestError
from hyfi_core.user_code import load_user_code

LOSS_KEY, METRICS_KEY = "data.loss", "validation.metrics"
OwnFunction = Callable[[torch.Tensor, torch.Tensor], object]


def load_loss(name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss of a name.

    Raises:
        RequestError: It cannot be imported, or is a class.
    """
    return _own_function(LOSS_KEY, name)


def _own_function(key: str, name: str) -> Callable[..., Any]:
    """Return a user's function; refuse a class, whose arguments are not outputs and labels."""
    function = load_user_code(key, name, "a function of (outputs, labels)")
    if inspect.isclass(function):
        of_class = metric_name(name)
        raise RequestError(
            f"{key} {name!r}: {of_class} is a class; name a function of (outputs, labels), or an object of the class, "
            f"as after my_{of_class.lower()} = {of_class}()"
        )
    return function


def metric_name(name: str) -> str:
    """Return the name under which a metric is recorded: that of its function."""
    return name.rpartition(":")[2]


def own_numbers(
    loss: str, metrics: Sequence[str], outputs: torch.Tensor, labels: torch.Tensor
) -> dict[str, float | None]:
    """Return the values of a user's loss (under ``loss``, if there is one) and metrics; None if not finite.

    Raises:
        RequestError: A function returns several numbers, or none.
    """
    numbers: dict[str, float | None] = {}
    if loss:
        numbers["loss"] = _one_number(LOSS_KEY, loss, _loss_of(loss, outputs, labels))
    for name in metrics:
        function: OwnFunction = _own_function(METRICS_KEY, name)
        numbers[metric_name(name)] = _one_number(METRICS_KEY, name, function(outputs, labels))
    return numbers


def _loss_of(name: str, outputs: torch.Tensor, labels: torch.Tensor) -> object:
    """Return what a user's loss returns for outputs in float64."""
    function = load_loss(name)
    try:
        return function(outputs, labels)
    except RuntimeError:
        # In training outputs are float32, and so are a loss's own tensors, such as weights of classes: PyTorch refuses
        # to use both dtypes together.
        return function(outputs.float(), labels)


def _one_number(key: str, name: str, value: object) -> float | None:
    """Return what a user's function returned, None if it is undefined; refuse what is no number."""
    number = _number(value)
    if number is None and value is not None:
        raise RequestError(f"{key} {name!r}: returns {_described(value)}; it must return one number")
    return finite(number)


def finite(value: float | None) -> float | None:
    """Return a number, None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def check_own(loss: str, metrics: Sequence[str], outputs: int, batch: torch.Tensor, evaluated: torch.Tensor) -> None:
    """Call the user's functions with outputs that are zero, and check what they return.

    Args:
        loss: Name of the loss; empty: none.
        metrics: Names of the metrics.
        outputs: Number of the model's outputs.
        batch: Labels of one batch.
        evaluated: Labels of the slides that will be evaluated.

    Raises:
        RequestError: A function cannot be imported, fails, does not return one number, or is a loss without a gradient
            or with parameters to train.
    """
    if loss:
        zeros = torch.zeros(len(batch), outputs, requires_grad=True)
        value = _tried(LOSS_KEY, loss, zeros, batch)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise RequestError(
                f"{LOSS_KEY} {loss!r}: of outputs {tuple(zeros.shape)} and labels {tuple(batch.shape)} it returns "
                f"{_described(value)}; it must return one number, a tensor computed from the outputs"
            )
        if torch.autograd.grad(value.sum(), zeros, allow_unused=True)[0] is None:
            raise RequestError(
                f"{LOSS_KEY} {loss!r}: does not depend on the outputs, so that nothing would be learnt; compute it "
                "from them without detach, item or numpy"
            )
        # All slides at once, and in float64, as validation calls it.
        zeros = torch.zeros(len(evaluated), outputs, dtype=torch.float64)
        _one_number(LOSS_KEY, loss, _tried(LOSS_KEY, loss, zeros, evaluated, _loss_of))
    for name in metrics:
        value = _tried(METRICS_KEY, name, torch.zeros(len(evaluated), outputs, dtype=torch.float64), evaluated)
        if _number(value) is None:
            raise RequestError(f"{METRICS_KEY} {name!r}: returns {_described(value)}; it must return one number")


def without_parameters() -> LossGuard:
    """Context that refuses trainable parameters of a loss, also on one rank: no optimizer of a run updates them."""
    return LossGuard(one_rank=False, trained=set(), elsewhere={})


def _tried(
    key: str,
    name: str,
    outputs: torch.Tensor,
    labels: torch.Tensor,
    call: Callable[[str, torch.Tensor, torch.Tensor], object] | None = None,
) -> object:
    """Return what a user's function returns for outputs and labels; refuse a function that fails.

    ``call``: a function of (name, outputs, labels) that calls it, such as `_loss_of`; None: it is called directly.
    """
    function: OwnFunction = _own_function(key, name)  # refuses a name that is no function, with ``call``, too
    try:
        # A loss with parameters of its own is refused: no optimizer updates them. A metric may compute with a network.
        with without_parameters() if key == LOSS_KEY else nullcontext():
            return function(outputs, labels) if call is None else call(name, outputs, labels)
    except RequestError as error:
        raise RequestError(f"{key} {name!r}: {error}") from error
    except Exception as error:
        raise RequestError(
            f"{key} {name!r}: fails for outputs {tuple(outputs.shape)} {outputs.dtype} and labels "
            f"{tuple(labels.shape)} {labels.dtype}: {type(error).__name__}: {error}"
        ) from error


def _number(value: object) -> float | None:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without gradient")
    return f"a {type(value).__name__}"
