"""Which modules of an encoder are gathered together, and their division among ranks.

::

    encoder    patches   block 0   block 1   block 2   …      each block is a unit: its weights are gathered together
    forward              gather ▸ compute ▸ free              weights outside of units are gathered when a call begins
    backward             gather ▸ compute ▸ gradients summed over ranks, each keeps its part ▸ free
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_map

from hyfi_core.errors import RequestError

_SMALL = 100
"""A unit has at least 1 / `_SMALL` of the weights: smaller ones are not worth a message."""
_LARGE = 4
"""A unit with more than 1 / `_LARGE` of the weights is divided further, if it contains units itself."""


def units_of(encoder: nn.Module) -> list[nn.Module]:
    """Return the units in the encoder's order: modules, usually blocks, whose weights are gathered together."""
    return list(_units(encoder, _bytes_of(encoder)))


def check_shardable(encoder: nn.Module) -> None:
    """Refuse encoders whose weights cannot be divided.

    Raises:
        RequestError: a weight is a scalar or has two names, has a gradient hook, dtypes differ, or torch is too old.
    """
    # Imported here: it takes a second, which runs without shards need not wait for.
    from torch.distributed import fsdp

    if not hasattr(getattr(fsdp, "FSDPModule", None), "set_force_sum_reduction_for_comms"):
        raise RequestError(f"shard=True needs a newer torch than {torch.__version__}, whose FSDP2 sums gradients")
    named = dict(encoder.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, parameter in named.items():
        if not parameter.dim():
            raise RequestError(f"shard=True: encoder weight {name!r} is a scalar, which cannot be divided")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise RequestError(f"shard=True: encoder weight {name!r} has a gradient hook, which would see a part of it")
        if id(parameter) in first:
            raise RequestError(f"shard=True: encoder weights {first[id(parameter)]!r} and {name!r} are one tensor")
        first[id(parameter)] = name
    dtypes = {parameter.dtype for parameter in named.values()}
    if len(dtypes) > 1:
        raise RequestError(f"shard=True: weights of the encoder have several dtypes: {sorted(map(str, dtypes))}")


def shard_encoder(encoder: nn.Module, group: Any, device: torch.device) -> int:
    """Divide the weights of an encoder among the ranks of a process group, in place (collective).

    Its parameters are shards afterwards (`weight_shards`); gradients are sums over the ranks.

    Returns:
        The most bytes of whole weights, and of their gradients, that a call has at once beside the shards.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for parameter in encoder.parameters():
        parameter.data = parameter.data.contiguous()  # the library takes no other strides, such as channels_last
    most = gathered_bytes(encoder)
    mesh = DeviceMesh.from_group(group, device.type)
    # Units first, the encoder last: that call then takes the weights that no unit has.
    for module in (*units_of(encoder), encoder):
        # Before `fully_shard`, which hooks the outputs for its backward: these hooks copy outputs that it cannot hook.
        module.register_forward_hook(_copied if module is encoder else _without_views)
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # sums, not means
        module.set_force_sum_reduction_for_comms(True)  # a plain sum, which gloo has, too
    return most


def gathered_bytes(encoder: nn.Module) -> int:
    """Return the most bytes of whole weights, and of their gradients, that a call has at once beside the shards."""
    sizes = sorted((_bytes_of(unit) for unit in units_of(encoder)), reverse=True)
    return 2 * (_bytes_of(encoder) - sum(sizes) + sum(sizes[:2]))  # one unit is gathered ahead


def _without_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return the outputs with views cloned: FSDP hooks outputs, and a view that is changed in place loses its hook."""
    return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) and x._is_view() else x, output)


def _copied(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return copies of the encoder's outputs, so that none is the output of a unit as well.

    If one tensor were both, backward would gather them in another order. That may differ between the chunks of ranks:
    ``x.contiguous()`` copies for several tiles, but not for one.
    """
    return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, output)


def _units(module: nn.Module, total: int) -> Iterator[nn.Module]:
    """Yield the modules whose weights are gathered together: blocks of a list, none too large or too small."""
    listed = isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(module, ParametrizationList)
    for child in module.children():
        inner, size = list(_units(child, total)), _bytes_of(child)
        # Elements of lists are a model's blocks. Weights are gathered when a module is called, and lists never are.
        is_block = listed and not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        is_too_small = size * _SMALL < total or not total
        is_too_large = size * _LARGE > total and bool(inner)  # without units inside, it cannot be divided further
        if is_block and not is_too_small and not is_too_large:
            yield child
        else:
            yield from inner


def _bytes_of(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
