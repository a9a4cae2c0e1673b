"""Under autocast every value has the dtype that it has in one process, on CPUs and GPUs, also where a part is empty."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import hyfi_core
from hyfi_core.capture.autocast import under_autocast
from hyfi_core.capture.program import KEY, Program
from hyfi_core.comm.base import Completed
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.ops.buffers import Buffers
from hyfi_core.rules.instructions import CustomCall, LocalCall
from hyfi_core.rules.table import OPERATORS
from hyfi_core.runtime.executor import _call
from tests.harness import Answers, captured_once, run_copies

Function = Callable[[torch.Tensor], Any]
SHAPE, GRID = (2, 3, 7, 11), (5, 1)  # maps of 4 x 6: one of five ranks has nothing


def tokens(y: torch.Tensor) -> torch.Tensor:
    return y.flatten(2).transpose(1, 2)


def index(y: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(y, dtype=torch.int64)


def kernel(y: torch.Tensor, *shape: int) -> torch.Tensor:
    return y.new_ones(shape).float()


def put(y: torch.Tensor) -> torch.Tensor:
    return y.index_put((torch.tensor([1]), torch.tensor([2])), y[:1, 2], accumulate=True)


# Operators that a list of autocast names, on CPUs or GPUs; what these call, and sums that ranks finish together.
FUNCTIONS: dict[str, Function] = {
    "unary": lambda y: [f(y) for f in (torch.acos, torch.asin, torch.cosh, torch.sinh, torch.tan)],
    "exponentials": lambda y: [f(y) for f in (torch.exp, torch.expm1)],
    "logarithms": lambda y: [f(y) for f in (torch.log, torch.log10, torch.log1p, torch.log2, torch.rsqrt, F.softplus)],
    "powers": lambda y: [y**2.5, 2.0**y, y**y, y.reciprocal(), torch.atan2(y, y + 1)],
    "with three": lambda y: [torch.addcdiv(y, y, y + 2), torch.addcmul(y, y, y)],
    "convolution": lambda y: F.conv2d(y, kernel(y, 4, 6, 3, 3), padding=1),
    "same": lambda y: F.conv2d(y, kernel(y, 4, 6, 3, 3), padding="same"),
    "transposed": lambda y: F.conv_transpose2d(y, kernel(y, 6, 4, 3, 3)),
    "line": lambda y: [F.conv1d(y.flatten(2), kernel(y, 4, 6, 3), padding=p) for p in (1, "same")],
    "linear": lambda y: F.linear(tokens(y), kernel(y, 4, 6)),
    "products": lambda y: [tokens(y) @ kernel(y, 6, 3), y.flatten(2).bmm(tokens(y)), y.flatten(2) @ tokens(y)],
    "product of matrices": lambda y: torch.mm(y.mean((2, 3)), kernel(y, 6, 2)),
    "einsum": lambda y: [torch.einsum("bchw,cd->bdhw", y, kernel(y, 6, 4)), torch.einsum("bchw,bdhw->bcd", y, y)],
    "slopes": lambda y: F.prelu(y, kernel(y, 6)),
    "norms": lambda y: [F.group_norm(y, 2), F.layer_norm(tokens(y), (6,)), F.instance_norm(y)],
    "norm of channels": lambda y: F.rms_norm(tokens(y), (6,)),
    "norms of maps": lambda y: [F.layer_norm(y, y.shape[1:]), F.layer_norm(y, y.shape[1:], *[kernel(y, 6, 4, 6)] * 2)],
    "batch norm": lambda y: F.batch_norm(y, None, None, training=True),
    "softmax of positions": lambda y: [y.flatten(2).softmax(-1), y.flatten(2).log_softmax(-1)],
    "sum of exponentials": lambda y: y.flatten(2).logsumexp(-1),
    "softmax as asked": lambda y: [y.flatten(2).softmax(-1, dtype=t) for t in (torch.float32, torch.bfloat16)],
    "softmax of channels": lambda y: [y.softmax(1), y.log_softmax(1), y.logsumexp(1)],
    "softmax of rows": lambda y: y.softmax(2),
    "sums": lambda y: [y.sum(), y.sum((2, 3)), y.sum(1), y.sum(2), y.mean((2, 3)), y.mean(2), y.mean()],
    "sizes": lambda y: [torch.linalg.vector_norm(y, p, (2, 3)) for p in (1, 2, torch.inf)],
    "sizes of channels": lambda y: torch.linalg.vector_norm(y, 2, 1),
    "moments": lambda y: [*torch.var_mean(y, (2, 3)), y.std((2, 3)), y.var(1)],
    "extremes": lambda y: [y.amax((2, 3)), y.amin((2, 3)), y.amax(2), y.max()],
    "so far": lambda y: [y.cumsum(2), y.cumsum(1), y.cumprod(2), y.cumprod(1), y.prod(1), y.prod(2)],
    "angle": lambda y: [F.cosine_similarity(y, y + 1, 1), F.cosine_similarity(y.flatten(2), y.flatten(2) + 1, 2)],
    "attention": lambda y: F.scaled_dot_product_attention(tokens(y), tokens(y) + 1, tokens(y) * 2),
    "few queries": lambda y: F.scaled_dot_product_attention(kernel(y, 2, 3, 6), tokens(y), tokens(y)),
    "pools": lambda y: [F.avg_pool2d(y, 2), F.max_pool2d(y, 2), F.adaptive_avg_pool2d(y, 2)],
    "pools to one": lambda y: [F.adaptive_avg_pool2d(y, 1), F.adaptive_max_pool2d(y, 1)],
    "response": lambda y: F.local_response_norm(y, 3),
    "joined": lambda y: [torch.cat([y, y.float()], dim) for dim in (1, 2, 3)],
    "stacked": lambda y: torch.stack([y, y.float()], 1),
    "padding": lambda y: [F.pad(y, (1, 2, 1, 0), mode) for mode in ("constant", "reflect", "replicate", "circular")],
    "resizing": lambda y: [F.interpolate(y, scale_factor=1.5, mode=m) for m in ("nearest", "bilinear", "bicubic")],
    "at places": lambda y: [y.scatter_add(1, index(y), y), put(y)],
}  # fmt: skip
_KEYS = ("AutocastCPU", "AutocastCUDA")
_NARROW = {"cpu": torch.bfloat16, "cuda": torch.float16}


class Nobody:
    """A rank whose messages go nowhere: dtypes do not depend on what others send."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, GRID[0] * GRID[1]

    def exchange(self, sends: Any, receives: Any) -> Completed:
        return Completed()

    def start_all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Completed:
        return Completed()


class Operators(TorchFunctionMode):
    """Slices and copies as operators: methods that do so for a fake tensor on a GPU want a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            return self._sliced(*args)
        if func is torch.Tensor.__setitem__:
            args, func = (self._sliced(*args[:2]), args[2]), torch.Tensor.copy_
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args)
        return func(*args, **(kwargs or {}))

    def _sliced(self, tensor: torch.Tensor, places: Any) -> torch.Tensor:
        places, dim = places if isinstance(places, tuple) else (places,), 0
        for at, place in enumerate(places):
            if place is Ellipsis:
                dim += tensor.dim() - dim - sum(later is not None for later in places[at + 1 :])
            elif isinstance(place, int):
                tensor = tensor.select(dim, place)
            else:
                assert place is None or isinstance(place, slice), places
                if place is None:
                    tensor = tensor.unsqueeze(dim)
                else:
                    tensor = torch.ops.aten.slice.Tensor(tensor, dim, *place.indices(tensor.shape[dim]))
                dim += 1
        return tensor


def returned(steps: Generator[Any, None, Any]) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def program_of(name: str) -> Program:
    torch.manual_seed(0)
    return captured_once(Answers({name: FUNCTIONS[name]}), SHAPE, torch.float32)


def dtypes_on(program: Program, device: str, rank: int) -> dict[str, torch.dtype]:
    """Return the dtypes of a rank's values; nothing is computed, so that no GPU is needed."""
    ranked = lower(program, Target(GRID, rank))
    read = ranked.read_box
    computed = {output for op in program.operators for output in op.outputs}
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, Operators(), torch.autocast(device, _NARROW[device]), torch.no_grad():
        values = {
            name: torch.empty(info.shape, dtype=info.dtype, device=device)
            for name, info in program.values.items()
            if name not in computed
        }
        values[program.image] = torch.empty((*SHAPE[:2], *read.shape), device=device)
        values[KEY] = torch.empty(3, dtype=torch.int64)
        for call in ranked.instructions:
            if isinstance(call, LocalCall):
                _call(call, values, values)
                continue
            inputs: Any = tuple(None if name is None else values[name] for name in call.inputs)
            if isinstance(call, CustomCall):
                outputs, _ = call.operator.forward(inputs)
            else:
                outputs, _ = returned(call.operator.forward(Nobody(rank), inputs))  # type: ignore[arg-type]
            values.update((n, out) for n, out in zip(call.outputs, outputs, strict=False) if n is not None)
    return {name: value.dtype for name, value in values.items()}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch, name: str, device: str) -> None:
    # Nothing is computed; PyTorch only has to be told not to turn autocast off for want of a GPU.
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(Buffers, "give_back", lambda self, tensors: None)  # compares addresses, which are all 0
    if (name, device) == ("batch norm", "cuda"):
        pytest.skip("a kernel for GPUs alone, without a fake")
    program = under_autocast(program_of(name), _NARROW[device], device)
    found = [dtypes_on(program, device, rank) for rank in range(GRID[0] * GRID[1])]
    for op in program.operators:
        for output in op.outputs:
            for rank, dtypes in enumerate(found):
                if output in dtypes:
                    assert dtypes[output] == program.values[output].dtype, (op.text, rank)
    for name in found[0]:
        assert len({dtypes[name] for dtypes in found if name in dtypes}) == 1, name


def test_every_operator_that_autocast_names_is_among_them() -> None:
    found = {op.text for name in FUNCTIONS for op in program_of(name).operators}
    texts = [text for text, one in OPERATORS.items() if one.rule is not None and text.startswith("aten.")]
    names = {text: text.removeprefix("aten.").removesuffix(".default") for text in texts}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    named = {text for text, name in names.items() if any(has(f"aten::{name}", key) for key in _KEYS)}
    assert len(named) > 40
    assert named <= found


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.score = nn.Conv2d(3, 6, 3, 2, 1), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = tokens(self.conv(x))
        return (self.score(y).softmax(1).transpose(1, 2) @ y).squeeze(1)


def test_a_pooling_by_attention_returns_what_plain_pytorch_returns() -> None:
    torch.manual_seed(0)
    model, images = Pooled(), torch.randn(SHAPE)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        wanted = model(images)
        probabilities = model.score(tokens(model.conv(images))).softmax(1)
    assert wanted.dtype == probabilities.dtype == torch.bfloat16
    plan = hyfi_core.ParallelPlan(grids=(GRID,))

    def body(comm: Any, module: nn.Module) -> torch.Tensor:
        engine = hyfi_core.parallelize(module, SHAPE, plan, comm, autocast=torch.bfloat16)
        logits: torch.Tensor = engine.predict(images)
        return logits

    for logits in run_copies(model, 5, body):
        assert logits.dtype == wanted.dtype
        assert (logits - wanted).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * wanted.abs().max()


def test_rows_of_two_dtypes_are_joined_in_the_wider_one() -> None:
    """A rank may have rows of one of them alone, and sends what others receive."""
    torch.manual_seed(0)
    model, images = Answers({"joined": lambda y: torch.cat([y, y.double()], 2).cumsum(2)}), torch.randn(SHAPE)
    with torch.no_grad():
        (wanted,) = model(images)

    def body(comm: Any, module: nn.Module) -> torch.Tensor:
        engine = hyfi_core.parallelize(module, SHAPE, hyfi_core.ParallelPlan(grids=(GRID,)), comm)
        (joined,) = engine.predict(images)
        result: torch.Tensor = joined
        return result

    for joined in run_copies(model, 5, body):
        assert joined.dtype == torch.float64
        assert torch.allclose(joined, wanted, atol=1e-5)


class Asked(nn.Module):
    """Operators that are asked for a dtype other than that of the map."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(30.0))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y, wide, narrow = x * self.scale, torch.float64, torch.float32
        flat, double = y.flatten(2), y.double()
        return [
            *(flat.softmax(-1, dtype=wide), flat.log_softmax(-1, dtype=wide), flat.softmax(-1, dtype=torch.bfloat16)),
            *(double.sum((2, 3), dtype=narrow), double.mean((2, 3), dtype=narrow), double.sum(2, dtype=narrow)),
            y.sum((2, 3), dtype=wide),
        ]


def test_a_dtype_that_an_operator_is_asked_for_is_that_of_its_result_and_of_its_precision() -> None:
    torch.manual_seed(0)
    model, images = Asked(), torch.randn(SHAPE)
    with torch.no_grad():
        wanted = model(images)

    def body(comm: Any, module: nn.Module) -> Any:
        return hyfi_core.parallelize(module, SHAPE, hyfi_core.ParallelPlan(grids=(GRID,)), comm).predict(images)

    for found in run_copies(model, 5, body):
        for ours, theirs in zip(found, wanted, strict=True):
            eps = 8 * torch.finfo(theirs.dtype).eps
            torch.testing.assert_close(ours, theirs, rtol=eps, atol=eps * float(theirs.abs().max()))
