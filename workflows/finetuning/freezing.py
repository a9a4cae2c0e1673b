"""Frozen parts of a model: parameters that are not trained, and batch norm that uses the loaded statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from hyfi_core.errors import RequestError
from workflows.config.data import ModelConfig
from workflows.console import counted
from workflows.finetuning.patterns import check_matches, matches


@dataclass(frozen=True)
class Freezing:
    """What was frozen in a model.

    Attributes:
        parameters: Names of the frozen parameters.
        norms: Names of the modules with running statistics that were set to evaluation mode.
        total: Number of parameters of the model, counted as tensors.
        epochs: Epochs after which all of it is trained; None: never.
    """

    parameters: tuple[str, ...]
    norms: tuple[str, ...]
    total: int
    epochs: int | None = None

    def __str__(self) -> str:
        """Return one line for the user."""
        norms = f"; batch norm with its loaded statistics: {len(self.norms)}" if self.norms else ""
        until = "" if self.epochs is None else f" for {counted(self.epochs, 'epoch')}"
        return f"frozen{until}: {len(self.parameters)} of {self.total} parameters{norms}"

    def is_over(self, epoch: int) -> bool:
        """Whether all of the model is trained in an epoch, counted from 0."""
        return self.epochs is not None and epoch >= self.epochs

    def release(self, model: nn.Module) -> None:
        """Let everything that was frozen be trained, in place."""
        named = dict(model.named_parameters(remove_duplicate=False))
        for name in self.parameters:
            named[name].requires_grad_(True)
        for path in self.norms:
            model.get_submodule(path).train()


def freeze(model: nn.Module, config: ModelConfig) -> Freezing | None:
    """Freeze the parts that ``model.freeze`` names, in place, and return them; None without patterns.

    Parameters that the factory has frozen stay frozen, and are never released. Dropout keeps its mode.

    Args:
        model: The model, in its modes of training.
        config: Its section of the configuration.

    Raises:
        RequestError: A pattern matches no parameter, or nothing is left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    if not any(parameter.requires_grad for parameter in named.values()):
        raise RequestError(
            f"model {config.name}: none of its {counted(len(named), 'parameter')} is trained (requires_grad); leave "
            "the head to train"
        )
    if not config.freeze:
        return None
    check_matches("model.freeze", config.freeze, named)
    chosen = [name for name in named if any(matches(name, pattern) for pattern in config.freeze)]
    # Without the parameters that the factory has frozen, which are never released.
    frozen = tuple(name for name in chosen if named[name].requires_grad)
    for name in frozen:
        named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise RequestError(
            f"model.freeze: {', '.join(config.freeze)} matches every parameter of the model; leave the head to train"
        )
    # After the parameters: a norm counts as frozen if none of its own is trained.
    norms = tuple(path for path, module in _norms(model) if module.training and _is_frozen(path, module, config.freeze))
    for path in norms:
        # Running statistics are no parameters: only evaluation mode keeps them.
        model.get_submodule(path).eval()
    return Freezing(frozen, norms, len(named), config.freeze_epochs)


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the modules with running statistics, by name."""
    return ((path, m) for path, m in model.named_modules() if m._buffers.get("running_mean") is not None)


def _is_frozen(path: str, norm: nn.Module, patterns: tuple[str, ...]) -> bool:
    """Whether a norm's statistics are frozen: all of its parameters are, or it has none and a pattern matches it."""
    parameters = [*norm.parameters(recurse=False)]
    if parameters:
        return not any(parameter.requires_grad for parameter in parameters)
    return any(matches(path, pattern) for pattern in patterns)
