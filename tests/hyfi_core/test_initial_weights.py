"""Initial weights of a part of a model are those of the whole, and the rest takes no memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hyfi_core import initial_weights
from hyfi_core.initial_weights import InitialWeights
from hyfi_core.models.amoebanet import amoebanet_d
from hyfi_core.models.resnet import resnet10, resnet_v2


class Tied(nn.Module):
    """A tied weight, a parameter of the root, and a loop that initialises again."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(4))
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.second.weight = self.first.weight
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                module.bias.data.normal_(0, 0.1)


class Orthogonal(nn.Module):
    """Initialised by a function whose result depends on values: parts cannot be drawn alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.orthogonal_(self.first.weight)
        nn.init.normal_(self.second.weight)


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "amoebanet": lambda: amoebanet_d(2, 3, 16),
    "resnet": lambda: resnet10(2, width=8),
    "resnet_v2": lambda: resnet_v2(11, width=4),
    "tied": Tied,
    "orthogonal": Orthogonal,
}


@pytest.mark.parametrize("name", BUILDS)
def test_each_part_has_the_values_of_the_whole_model(name: str) -> None:
    torch.manual_seed(5)
    whole = BUILDS[name]().state_dict()
    after = torch.get_rng_state()
    names = list(whole)
    torch.manual_seed(6)
    weights = InitialWeights(BUILDS[name], 5)
    assert all(tensor.is_meta for tensor in (*weights.model.parameters(), *weights.model.buffers()))
    for part in (names, names[: len(names) // 3], names[len(names) // 2 :], names[3:4], []):
        weights.prepare(part)
        assert torch.equal(torch.get_rng_state(), after)
        for of in part:
            found = weights(of)
            assert type(found) in (torch.Tensor, nn.Parameter) and torch.equal(found, whole[of]), of
    with pytest.raises(KeyError):
        weights(names[0])


def test_what_is_not_wanted_is_forgotten_module_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    forget = initial_weights._forgotten

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor.nbytes)
        return forget(tensor)

    monkeypatch.setattr(initial_weights, "_forgotten", counted)
    weights = InitialWeights(BUILDS["amoebanet"], 5)
    bytes_of = {name: tensor.nbytes for name, tensor in BUILDS["amoebanet"]().state_dict().items()}
    kept = [name for name in bytes_of if name.startswith("head")] or list(bytes_of)[-2:]
    weights.prepare(kept)
    assert sum(held) == sum(size for name, size in bytes_of.items() if name not in kept)


def test_other_threads_build_their_models_as_always() -> None:
    built: list[nn.Module] = []

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            if not torch.empty(()).is_meta:
                import threading

                thread = threading.Thread(target=lambda: built.append(resnet10(2, width=4)))
                thread.start()
                thread.join()

    InitialWeights(Slow, 5).prepare([])
    assert all(type(parameter) is nn.Parameter and not parameter.is_meta for parameter in built[0].parameters())
