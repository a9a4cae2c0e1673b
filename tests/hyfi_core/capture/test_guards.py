"""What a trace alone would lose is kept or refused, and the user's module stays as it was."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hyfi_core
from hyfi_core.capture.export import _decompositions, capture
from hyfi_core.capture.guards import refuse_fake_constants, trace_guards
from hyfi_core.capture.storing.stored_tensors import StoredTensors
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from tests.harness import assert_equal_to_one_process
from tests.hyfi_core.capture.test_watched_calls import Doubled

pytestmark = pytest.mark.captures_each

SHAPE = (2, 3, 21, 30)


class Plain:
    """An answer that PyTorch knows nothing of."""

    def __init__(self, logits: torch.Tensor, name: str) -> None:
        self.logits, self.name = logits, name


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor
    scale: float


class HandWritten(nn.Module):
    """A norm that keeps its mean by assignment, and a loss of memory for what nobody may see."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean((0, 2, 3))
        self.mean = 0.9 * self.mean + 0.1 * mean.detach()
        return x - mean[None, :, None, None]


def no_grad(net: GuardedNet, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        frozen = torch.relu(net.last(y))
    return frozen + y.sigmoid()


def keeps(net: GuardedNet, y: torch.Tensor) -> torch.Tensor:
    net.features = y
    return y


FORWARDS: dict[str, Callable[[GuardedNet, torch.Tensor], torch.Tensor]] = {
    "no gradient": no_grad,
    "data": lambda net, y: y - y.data.clamp(min=0) * y,
    "assigned buffer": lambda net, y: net.own(y),
    "kept features": keeps,
    "tensor hook": lambda net, y: [y.register_hook(lambda dy: 2 * dy), y][1],
}


class GuardedNet(nn.Module):
    """A small network with something unusual in its middle."""

    def __init__(self, middle: str, answer: Callable[[torch.Tensor], Any] = lambda logits: logits) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.own = nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), HandWritten()
        self.last, self.head = nn.Conv2d(6, 6, 3, 1, 1), nn.Linear(6, 2)
        self.middle, self.answer, self.calls = middle, answer, 0

    def extra_repr(self) -> str:
        return f"{self.middle}, {self.answer}"  # programs are shared between modules that look alike

    def forward(self, x: torch.Tensor) -> Any:
        y = FORWARDS.get(self.middle, lambda net, y: y)(self, self.norm(self.first(x)))
        return self.answer(self.head(self.last(y).mean((2, 3))))


@pytest.mark.parametrize("middle", ["no gradient", "data", "assigned buffer", "kept features"])
def test_it_trains_as_one_process_does(middle: str) -> None:
    assert_equal_to_one_process(GuardedNet(middle).double(), SHAPE, (1, 2))


@pytest.mark.parametrize("answer", [lambda y: Plain(y, "net"), lambda y: Frozen(y, 2.0)])
def test_answers_may_be_objects_with_logits(answer: Callable[[torch.Tensor], Any]) -> None:
    net = GuardedNet("", answer).double()
    assert_equal_to_one_process(net, SHAPE, (1, 2), output=lambda found: found.logits)
    images = torch.zeros(SHAPE, dtype=torch.float64)
    engine = hyfi_core.parallelize(net, SHAPE, hyfi_core.ParallelPlan(grids=((1, 1),)), AloneCommunicator())
    expected, found = net.eval()(images), engine.predict(images)
    assert type(found) is type(expected) and torch.equal(found.logits, expected.logits)
    assert {key: value for key, value in vars(found).items() if key != "logits"} == {
        key: value for key, value in vars(expected).items() if key != "logits"
    }


@pytest.mark.parametrize(("middle", "words"), [("tensor hook", "hook on a")])
def test_a_backward_of_its_own_is_refused(middle: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        capture(GuardedNet(middle), SHAPE, torch.float32)


def test_backward_hooks_are_refused_with_their_module() -> None:
    net = GuardedNet("")
    net.last.register_full_backward_hook(lambda module, dx, dy: None)
    with pytest.raises(RequestError, match=r"last \(Conv2d\) has backward hooks"):
        capture(net, SHAPE, torch.float32)


def test_a_buffer_of_another_shape_is_refused() -> None:
    net = GuardedNet("assigned buffer")
    net.own.mean = torch.zeros(())
    with pytest.raises(RequestError, match="HandWritten changes the shape or dtype of its buffer 'mean'"):
        capture(net, SHAPE, torch.float32)


def teacher(net: GuardedNet, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        net.last.weight.mul_(0.99)
    return net.last(y)


def test_a_parameter_that_a_forward_changes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORWARDS, "teacher", teacher)
    net = GuardedNet("teacher")
    net.last.requires_grad_(False)
    with pytest.raises(RequestError, match=r"the parameter last\.weight in its forward .*; change it between steps"):
        capture(net, SHAPE, torch.float32)


def test_the_module_and_pytorch_stay_as_they_were() -> None:
    net, touched = GuardedNet("kept features"), (torch.autograd.Function, torch.Tensor, nn.Module)
    before = [dict(vars(kind)) for kind in touched]
    capture(net, SHAPE, torch.float32)
    assert not hasattr(net, "features") and net.calls == 0 and not net._forward_hooks
    assert [dict(vars(kind)) for kind in touched] == before
    copy.deepcopy(net)


def test_a_refused_model_leaves_no_mode_of_pytorch_active() -> None:
    class Refused(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert torch._C._len_torch_function_stack() > 1
            raise ValueError

    with pytest.raises(RequestError, match="Refused cannot be captured"):
        capture(Refused(), SHAPE, torch.float32)
    assert torch._C._len_torch_function_stack() == 0


def test_what_a_trace_computed_with_is_no_constant() -> None:
    with FakeTensorMode():
        fake = torch.zeros(2)
    with pytest.raises(RequestError, match=r"turns a computed tensor of shape \(2,\) into a constant"):
        refuse_fake_constants({"known": torch.zeros(2), "c": fake})


CALLS = [0]
NUMBERS = np.random.default_rng(0)
SHAPES: list[tuple[int, ...]] = []
LOGGED: list[int] = []
OWN = torch.Generator()


def counted(net: GuardedNet, y: torch.Tensor) -> torch.Tensor:
    CALLS[0] += 1
    return y * CALLS[0]


@pytest.mark.parametrize(
    ("middle", "words"),
    [
        (counted, "the forward changes 'CALLS' outside of the model"),
        (lambda net, y: (LOGGED.append(1), y * len(LOGGED))[1], "the forward changes 'LOGGED' outside of the model"),
        (lambda net, y: y * NUMBERS.random(), "the forward changes 'NUMBERS' outside of the model"),
        (
            lambda net, y: y * torch.rand(1, generator=OWN),
            r"draws from a torch.Generator.*guards.py:\d+",
        ),
    ],
)
def test_counters_and_generators_outside_of_the_model_are_refused(
    middle: Callable[[Any, torch.Tensor], torch.Tensor], words: str
) -> None:
    net = GuardedNet("")
    net.answer = lambda y: middle(net, y)
    with pytest.raises(RequestError, match=words):
        capture(net, SHAPE, torch.float32)


def test_caches_outside_of_the_model_are_allowed() -> None:
    net = GuardedNet("")
    net.answer = lambda y: (SHAPES.append(tuple(y.shape)), y)[1]
    assert capture(net, SHAPE, torch.float32).operators and SHAPES


def test_an_attribute_that_a_forward_changes_is_refused() -> None:
    class CallCounter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.seen = 0, list[int]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.calls

    class Listing(CallCounter):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(len(self.seen))
            return x * len(self.seen)

    for net, name in ((CallCounter(), "calls"), (Listing(), "seen")):
        with pytest.raises(RequestError, match=f"changes the attribute {name!r} of 0, which"):
            capture(nn.Sequential(net), SHAPE, torch.float32)
    assert net.calls == 0


def test_a_cast_does_not_say_where_the_capture_ran() -> None:
    class Cast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.float64, memory_format=torch.channels_last).mean((2, 3))

    casts = [op for op in capture(Cast(), SHAPE, torch.float32).operators if "_to_copy" in op.text]
    assert casts and not any("device" in op.kwargs for op in casts)


def test_other_threads_run_on_while_one_traces() -> None:
    def works() -> float:
        x = torch.ones(2, requires_grad=True)
        y = x * 1
        y.register_hook(lambda dy: 3 * dy)
        Doubled.apply(y).sum().backward()
        return float((x.grad + y.data).sum())

    with trace_guards(GuardedNet(""), StoredTensors(), None), ThreadPoolExecutor(1) as pool:
        assert pool.submit(works).result() == 14


FLAGS = (torch.compiler.is_compiling, torch.compiler.is_exporting)


@contextlib.contextmanager
def flagged() -> Iterator[ThreadPoolExecutor]:
    """Context with the flags of an export, and another thread."""
    flags = [mock.patch(f"torch.compiler._{flag.__name__}_flag", True) for flag in FLAGS]
    with flags[0], flags[1], ThreadPoolExecutor(1) as pool:
        yield pool


def found_flags() -> list[bool]:
    return [torch.compiler.is_compiling(), torch.compiler.is_exporting()]


def test_an_optimizer_in_another_thread_does_not_take_itself_for_traced() -> None:
    """Adam's corrections are computed in float32 then: ranks as threads differed by 1e-7."""
    with trace_guards(GuardedNet(""), StoredTensors(), None), flagged() as pool:
        assert all(found_flags()) and not any(pool.submit(found_flags).result())


def test_nor_while_a_graph_is_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def decompositions(traced: Any) -> Any:
        with flagged() as pool:
            found.append((all(found_flags()), any(pool.submit(found_flags).result())))
        return _decompositions(traced)

    monkeypatch.setattr("hyfi_core.capture.export._decompositions", decompositions)
    capture(nn.Conv2d(3, 4, 3), (1, 3, 8, 8), torch.float32)
    assert found and set(found) == {(True, False)}


def test_clearing_gradients_in_another_thread_does_not_annotate_the_trace() -> None:
    """It restored what it had found, at times after the trace's end: a KeyError in the thread or in the trace."""
    annotated = []

    class Groups(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            annotated.append("custom" in torch.fx.traceback.current_meta)
            return super().__iter__()

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups = Groups(optimizer.param_groups)
    with trace_guards(GuardedNet(""), StoredTensors(), None), flagged() as pool:
        pool.submit(optimizer.zero_grad).result()
    assert annotated and not any(annotated)


def test_the_momentum_of_a_cumulative_average_is_data_and_the_module_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None))
    seen: list[object] = []
    model[1].register_forward_pre_hook(lambda module, given: seen.append(module.momentum))
    program = capture(model, (2, 3, 8, 8), torch.float32)
    assert seen and set(seen) == {None}
    (norm,) = (op for op in program.operators if "native_batch_norm" in op.text)
    assert norm.args[6] == 1.0  # the batch's own statistics; what is kept of them is arithmetic behind it
    later = program.operators[program.operators.index(norm) :]
    count = program.mutations["1.num_batches_tracked"]
    assert any(count in op.inputs for op in later)
    assert nn.BatchNorm2d.forward is nn.modules.batchnorm._BatchNorm.forward
    assert "forward" not in vars(model[1])
