"""Parameter groups: the learning rate and the weight decay of each parameter.

::

    optimizer.lr 1e-3, layer_decay 0.5        depth   rate
    stem                                        0     1.25e-4
    blocks.0                                    1     2.5e-4
    blocks.1                                    2     5e-4
    head                                        3     1e-3
    groups: [{match: head, lr: 1e-2}]                 1e-2      × 0.5 for each layer below the last one, in a group, too

Decay by layers is that of ELECTRA (arXiv 2003.10555) and BEiT (arXiv 2106.08254).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hyfi_core.errors import RequestError
from workflows.config.learning import OptimizerConfig
from workflows.finetuning.patterns import check_matches, matches

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_TRUNK_SHARE = 0.5
"""Share of the model's parameters above which a module is the trunk; each of its layers counts by itself."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with one learning rate and one weight decay.

    Attributes:
        names: Their names.
        lr: Learning rate after the warm-up, for the run's batch.
        weight_decay: Weight decay.
    """

    names: tuple[str, ...]
    lr: float
    weight_decay: float


def parameter_groups(model: nn.Module, config: OptimizerConfig, batch: int) -> tuple[ParameterGroup, ...]:
    """Return the groups of a model's parameters, each parameter once; they are the same on every rank.

    Args:
        model: The model; its values are not read.
        config: The optimizer's section of the configuration.
        batch: Slides of one update, for the learning rate.

    Raises:
        RequestError: A group matches no parameter, or only those of groups before it.
    """
    named = dict(model.named_parameters())
    chosen = _chosen(config, list(named))
    depth = {} if config.layer_decay is None else layer_depths(model)
    last = max(depth.values(), default=0)
    # (index of the configured group or -1, lr, weight decay) -> names.
    members: dict[tuple[int, float, float], list[str]] = {}
    for name, parameter in named.items():
        group = config.groups[chosen[name]] if name in chosen else None
        lr = config.scaled_lr(batch, None if group is None else group.lr)
        if config.layer_decay is not None:
            lr *= config.layer_decay ** (last - depth[name])
        decay = None if group is None else group.weight_decay
        if decay is None:
            # Norms and biases have one dim.
            decay = config.weight_decay if parameter.ndim > 1 or config.decays_norms else 0.0
        # In the order of the model, so all ranks have the same groups in the same order.
        members.setdefault((chosen.get(name, -1), lr, decay), []).append(name)
    return tuple(ParameterGroup(tuple(names), lr, decay) for (_, lr, decay), names in members.items())


def _chosen(config: OptimizerConfig, names: Sequence[str]) -> Mapping[str, int]:
    """Return name of a parameter -> index in ``optimizer.groups`` of the first group that matches it."""
    chosen: dict[str, int] = {}
    for index, group in enumerate(config.groups):
        key = f"optimizer.groups[{index}].match"
        check_matches(key, group.match, names)
        fitting = [name for name in names if any(matches(name, pattern) for pattern in group.match)]
        free = [name for name in fitting if name not in chosen]
        if not free:
            raise RequestError(
                f"{key}: all parameters that {', '.join(group.match)} matches belong to groups before it, and "
                f"the first group counts; put it before them"
            )
        chosen |= dict.fromkeys(free, index)
    return chosen


def layer_depths(model: nn.Module) -> dict[str, int]:
    """Return name of a parameter -> its layer, from 0; the last is the head, if the model has one.

    A layer is a direct part of the model, or a block of a sequence of blocks. A module with most of the parameters that
    repeats blocks (the trunk) is no layer: its parts and blocks are. Parameters outside of layers (a class token)
    belong to the first.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    layers = list(_layers(model, "", total))
    depths: dict[str, int] = {}
    for name, _ in model.named_parameters():
        inside = (depth for depth, path in enumerate(layers) if name == path or name.startswith(f"{path}."))
        depths[name] = next(inside, 0)  # layers do not overlap
    return depths


def _layers(module: nn.Module, path: str, total: int) -> Iterator[str]:
    """Yield the paths of the layers inside a module, in its order; ``total``: number of the model's weights.

    A child is one layer, unless it has layers inside, such as a sequence of blocks; without weights it is none.
    """
    for name, child in module.named_children():
        size = sum(parameter.numel() for parameter in child.parameters())
        inner = f"{path}.{name}" if path else name
        if size and _has_layers_inside(child, is_most=size > _TRUNK_SHARE * total):
            yield from _layers(child, inner, total)
        elif size:
            yield inner


def _has_layers_inside(module: nn.Module, *, is_most: bool) -> bool:
    """Whether to look for layers inside a module; otherwise it is one layer.

    Layers are inside sequences of blocks, and inside a module that has most of the model's parameters (``is_most``) and
    repeats blocks somewhere.
    """
    if isinstance(module, _LISTS):
        # A list whose parts have parts is a sequence of blocks; otherwise it is a block itself.
        return is_most or any(True for child in module.children() for _ in child.children())
    return is_most and any(isinstance(part, _LISTS) and _repeats(part) for part in module.modules())


def _repeats(blocks: nn.Module) -> bool:
    """Whether some class with parameters occurs twice among the parts: they are blocks, not different layers."""
    kinds = [type(child) for child in blocks.children() if any(True for _ in child.parameters())]
    return len(kinds) > len(set(kinds))
