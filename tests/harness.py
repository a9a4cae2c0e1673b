"""Everything parallel is held against one process: the reference, the run on thread-ranks, and how equal is equal."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.comm.threads import run_ranks
from hyfi_core.lowering.lower import Target, lower

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass
class Result:
    """What a training step left behind."""

    loss: float
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    logits: torch.Tensor
    traffic: list[dict[str, dict[str, int]]]


_LOCK = threading.Lock()
_OF_HOOKS = ("hooks", "hooks_with_kwargs", "hooks_always_called")
_PROGRAMS: dict[Any, Program] = {}


def captured_once(model: nn.Module, shape: Any, dtype: torch.dtype) -> Program:
    """Capture equal modules once in this process: ranks hold copies of one, and a capture takes half a second or more.

    Modules are equal if their classes, parameters, buffers, hooks and plain attributes are.
    """
    tensors: dict[int, str] = {}
    described: list[Any] = [type(model), shape, dtype]
    for path, module in model.named_modules(remove_duplicate=False):
        described.append((path, type(module), repr(module)))
        for name, value in sorted(vars(module).items()):
            if "state_dict" not in name:  # hooks of saving and loading
                described.append((path, name, _described(value, f"{path}.{name}", tensors)))
    with _LOCK:
        key = tuple(described)
        if key not in _PROGRAMS:
            _PROGRAMS[key] = capture(model, shape, dtype)
        return _PROGRAMS[key]


def _described(value: Any, path: str, tensors: dict[int, str]) -> Any:
    """Return what makes an attribute different from another; tied tensors name the first path to them."""
    if isinstance(value, torch.Tensor):
        first = tensors.setdefault(id(value), path)
        return first, tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, Mapping):
        if path.rpartition(".")[2].endswith(_OF_HOOKS):  # keys are numbers, which count all hooks of the process
            return tuple(_described(item, path, tensors) for item in value.values())
        return tuple((str(name), _described(item, f"{path}.{name}", tensors)) for name, item in value.items())
    if isinstance(value, (list, tuple, set)):
        return tuple(_described(item, path, tensors) for item in value)
    if isinstance(value, (nn.Module, weakref.ref)):  # what recurrent layers refer to are their parameters
        return type(value)
    text = repr(value)
    return value if " at 0x" in text else text  # an address may be used again, an object that is kept may not


def run_copies(model: nn.Module, ranks: int, body: Callable[[Any, nn.Module], Any], strict: bool = False) -> list[Any]:
    """Run ``body(comm, module)`` on thread-ranks, each with its own copy of the module; strict as NCCL if asked.

    The check at start is left out: what the ranks compute is compared here.
    """
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    with (
        mock.patch("hyfi_core.runtime.subject.capture", captured_once),
        mock.patch("hyfi_core.runtime.subject.verify_capture", lambda *given: None),
        mock.patch("hyfi_core.runtime.subject.mixes_images", lambda *given: False),
    ):
        return run_ranks(ranks, lambda comm: body(comm, copies[comm.rank]), strict=strict)


def identity(out: Any) -> Any:
    return out


class OffsetImages(nn.Module):
    """A network on images plus an offset of their shape, zero: the offset's gradient is that of the images."""

    def __init__(self, network: nn.Module, shape: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.network = network
        self.offset = nn.Parameter(torch.zeros(shape))

    def forward(self, images: torch.Tensor) -> Any:
        return self.network(images + self.offset)


def one_process(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    microbatches: int,
    loss: Loss,
    output: Callable[[Any], Any],
) -> Result:
    """The reference: the unmodified module on whole images, gradients accumulated over the same micro-batches."""
    total = 0.0
    for part, targets in zip(images.chunk(microbatches), labels.chunk(microbatches), strict=True):
        share = loss(output(model(part)), targets) / microbatches
        share.backward()
        total += share.item()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [(module, module.training) for module in model.modules()]
    with torch.no_grad():
        logits = output(model.eval()(images))
    for module, flag in flags:
        module.training = flag
    return Result(total, gradients, state, logits, [])


def parallel(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    plan: hyfi_core.ParallelPlan,
    loss: Loss,
    output: Callable[[Any], Any] | None,
) -> Result:
    """The same on thread-ranks, each with a copy of the module."""

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, tuple(images.shape), plan, comm, loss=loss, output=output)
        value = engine.accumulate(images, labels)
        traffic = engine.traffic()
        logits = engine.predict(images)
        return value, engine.gather_gradients(), engine.gather_state_dict(), logits, traffic

    results = run_copies(model, plan.ranks, body)
    assert len({result[0] for result in results}) == 1, "ranks disagree on the loss"
    for result in results[1:]:
        assert torch.equal(result[3], results[0][3]), "ranks disagree on the logits"
    loss_value, gradients, state, logits, _ = results[0]
    return Result(loss_value, gradients, state, logits, [result[4] for result in results])


def assert_equal_to_one_process(
    model: nn.Module,
    shape: tuple[int, int, int, int],
    grid: tuple[int, int],
    *,
    microbatches: int = 1,
    classes: int = 2,
    loss: Loss = F.cross_entropy,
    output: Callable[[Any], Any] | None = None,
    tolerance: float = 1e-10,
    seed: int = 0,
    fused_halo: Any = "auto",
    by_cells: bool = False,
) -> Result:
    """Train one step both ways in float64 and compare loss, logits, every gradient, every buffer.

    The bound is the one the project promises: for each parameter the error stays below 1e-10 of its gradient's norm, or
    of a thousandth of all gradients' norm where its own is smaller still.
    """
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(shape, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, classes, (shape[0],), generator=generator)
    model = model.double()
    plan = hyfi_core.ParallelPlan(grids=(grid,), microbatches=microbatches, fused_halo=fused_halo)
    found = parallel(model, images, labels, plan, loss, output)
    wanted = one_process(copy.deepcopy(model), images, labels, microbatches, loss, output or identity)
    compare(found, wanted, tolerance)
    for spill in (None, "memory") if by_cells else ():
        cells = hyfi_core.ParallelPlan(grids=((1, 1),), microbatches=microbatches, cells=grid, spill=spill)
        logits = _predicted(model, images, cells, output, wanted.state)
        _assert_logits(logits, wanted, tolerance)
    return found


def assert_equal_also_by_cells(
    model: nn.Module, shape: tuple[int, int, int, int], grid: tuple[int, int], **options: Any
) -> Result:
    """Compare as ``assert_equal_to_one_process``, and the logits of as many cells as there are ranks.

    Evaluation by cells has rules and fused runs of its own.
    """
    return assert_equal_to_one_process(model, shape, grid, by_cells=True, **options)


def _predicted(
    model: nn.Module,
    images: torch.Tensor,
    plan: hyfi_core.ParallelPlan,
    output: Callable[[Any], Any] | None,
    state: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Return the logits in evaluation mode, with the weights and buffers of a state."""

    def body(comm: Any, module: nn.Module) -> torch.Tensor:
        module.load_state_dict(state)
        engine = hyfi_core.parallelize(module.eval(), tuple(images.shape), plan, comm, output=output)
        logits: torch.Tensor = engine.predict(images)
        return logits

    found: torch.Tensor = run_copies(model, plan.ranks, body)[0]
    return found


def _assert_logits(logits: torch.Tensor, wanted: Result, tolerance: float) -> None:
    assert (logits - wanted.logits).abs().max() <= tolerance * max(1.0, float(wanted.logits.abs().max()))


def compare(found: Result, wanted: Result, tolerance: float = 1e-10) -> None:
    """Assert that two results are equal to the tolerance."""
    assert abs(found.loss - wanted.loss) <= tolerance * max(1.0, abs(wanted.loss))
    _assert_logits(found.logits, wanted, tolerance)
    assert set(found.gradients) == set(wanted.gradients)
    everything = torch.cat([g.flatten() for g in wanted.gradients.values()]).norm()
    for name, gradient in wanted.gradients.items():
        error = (found.gradients[name] - gradient).norm()
        assert error <= tolerance * max(gradient.norm(), 1e-3 * everything), (
            f"{name}: {error:.1e} of {gradient.norm():.1e}"
        )
    assert set(found.state) == set(wanted.state)
    for name, value in wanted.state.items():
        if value.is_floating_point():
            assert (found.state[name] - value).abs().max() <= tolerance * max(1.0, float(value.abs().max())), name
        else:
            assert torch.equal(found.state[name], value), name


class Answers(nn.Module):
    """A convolution to 6 channels at half the size, and several functions of its map, each an answer of its own."""

    def __init__(self, functions: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]) -> None:
        super().__init__()
        self.functions = functions
        self.stem = nn.Conv2d(3, 6, 3, 2, 1)

    def extra_repr(self) -> str:
        return str(list(self.functions.items()))  # programs are captured once for each

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.stem(x)
        y = torch.where(y < -0.5, -0.5, y)  # ties
        return [function(y) for function in self.functions.values()]


def assert_answers_equal_one_process(
    functions: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
    shape: tuple[int, int, int, int],
    grid: tuple[int, int],
    gathers: bool = False,
) -> None:
    """Compare the values of all functions, and what their gradients add up to; ``gathers``: maps may be gathered."""
    torch.manual_seed(0)
    model = Answers(functions)
    program = captured_once(model.double(), shape, torch.float64)
    for rank in () if gathers else {0, grid[0] * grid[1] - 1}:
        lower(program, Target(grid, rank, gather_bytes=0))

    def joined(answers: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([answer.double().flatten() for answer in answers])

    def loss(joined: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (joined * torch.arange(len(joined), device=joined.device).cos()).mean()

    assert_equal_also_by_cells(model, shape, grid, loss=loss, output=joined)
