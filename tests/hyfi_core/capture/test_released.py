"""Parameters and buffers without values: put in place, and stood in for during a capture."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.capture.module_state import module_state
from hyfi_core.capture.released import named_tensors, release
from hyfi_core.errors import RequestError


def network() -> nn.Sequential:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1))
    net[0].requires_grad_(False)
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def test_a_released_tensor_keeps_all_but_its_values() -> None:
    net = network()
    before = {name: (t.shape, t.stride(), t.dtype, t.requires_grad) for name, t in named_tensors(net).items()}
    hook = net[2].weight.register_hook(lambda gradient: gradient)
    state = module_state(net)
    former = release(net, named_tensors(net).keys())
    after = named_tensors(net)
    assert all(tensor.is_meta for tensor in after.values())
    assert before == {name: (t.shape, t.stride(), t.dtype, t.requires_grad) for name, t in after.items()}
    assert net[2].weight._backward_hooks == {hook.id: hook.hooks_dict_ref()[hook.id]}
    assert module_state(net) == state  # no capture is repeated
    assert all(reference() is None for reference, _ in former)  # the memory is free
    with pytest.raises(RequestError, match="conv2d was called with values and a released tensor of the model"):
        net(torch.zeros(1, 3, 9, 9))
    torch.relu_(input=net[2].weight.detach())  # by name alone; it changes what nothing reads
    with pytest.raises(RequestError, match="add was called with values"):
        torch.add(input=torch.zeros(4), other=net[2].bias)


@pytest.mark.parametrize("kept", ["", "0."])
def test_a_capture_of_a_released_module_is_that_of_the_whole(kept: str) -> None:
    net, shape = network(), (2, 3, 9, 9)
    whole = [capture(net.train(mode), shape, torch.float32) for mode in (True, False)]
    release(net, [name for name in named_tensors(net) if not kept or not name.startswith(kept)])
    found = [capture(net.train(mode), shape, torch.float32) for mode in (True, False)]
    assert [program.digest() for program in found] == [program.digest() for program in whole]
    assert [program.mutations for program in found] == [program.mutations for program in whole]
    held = {name for name, tensor in named_tensors(net).items() if not tensor.is_meta}
    assert held == ({"0.weight"} if kept else set())


def test_tensors_that_an_attribute_holds_stay() -> None:
    net = network()
    net.cached = [net[0].weight, {"mean": net[1].running_mean}]
    release(net, named_tensors(net).keys())
    assert {name for name, t in named_tensors(net).items() if not t.is_meta} == {"0.weight", "1.running_mean"}
