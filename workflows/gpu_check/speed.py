"""Parts of a check: the speed of the engine on one rank, of staged messages, and of the feed."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from data.loading.batches import BatchLayout
from data.loading.feed import FeedSpec
from data.loading.loader import LoaderService
from data.loading.normalise import Normalisation
from data.loading.order import SampleStream
from data.loading.remote_feed import RemoteFeed
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.lowering.compiling.segment_compiler import CompileMode, forget_code
from hyfi_core.models import resnet
from hyfi_core.plan.box import Box
from hyfi_core.plan.input_part import InputPart
from hyfi_core.runtime.engine import Engine
from hyfi_core.runtime.settings import GraphMode
from workflows.gpu_check.measure_step import UNTIMED_STEPS, Row, StepBody, finish, free, step_s, tried
from workflows.gpu_check.setting import Setting
from workflows.training.feeding import BatchImages

CLASSES = 2


def network(setting: Setting) -> nn.Module:
    """Return the network that is timed, channels-last on the device, in training mode."""
    torch.manual_seed(0)
    model: nn.Module = getattr(resnet, setting.sizes.network)(CLASSES).to(memory_format=torch.channels_last)
    return model.to(setting.device).train()


def batch(setting: Setting, side_px: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one image on the device, channels-last, and its label; the same ones on every rank."""
    torch.manual_seed(0)
    shape = (1, 3, side_px, side_px)
    images = torch.empty(shape, device=setting.device, memory_format=torch.channels_last)
    return images.normal_(), torch.ones(1, dtype=torch.long, device=setting.device)


def engine_of(
    setting: Setting,
    side_px: int,
    plan: hyfi_core.ParallelPlan,
    comm: Communicator,
    model: nn.Module | None = None,
    compile: CompileMode = "off",
    cuda_graphs: GraphMode = "auto",
) -> Engine:
    """Return an engine for one image, with SGD and bfloat16 autocast."""
    return hyfi_core.parallelize(
        network(setting) if model is None else model,
        (1, 3, side_px, side_px),
        plan,
        comm,
        optimizer=_sgd,
        autocast=setting.autocast,
        memory_format="channels_last",
        verify=False,
        compile=compile,
        cuda_graphs=cuda_graphs,
    )


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def speed(setting: Setting, side: str) -> Iterator[Row]:
    """Time a step of plain PyTorch and of the engine on one rank, with CUDA graphs and without; none is compiled."""
    sides = {
        "eager": partial(plain_step, setting, int(side)),
        "engine": partial(engine_step, setting, int(side)),
        "engine_without_graphs": partial(engine_step, setting, int(side), cuda_graphs="off"),
    }
    yield from _compared(setting, int(side), sides, (("engine", "eager"), ("engine_without_graphs", "eager")))


def compiled(setting: Setting, side: str) -> Iterator[Row]:
    """Time the first step and later ones of plain PyTorch and of the engine on one rank, both compiled."""
    sides = {
        "compiled": partial(plain_step, setting, int(side), compiled=True),
        "compiled_engine": partial(engine_step, setting, int(side), compiled=True),
    }
    with warnings.catch_warnings():
        # A model that PyTorch leaves uncompiled is an error: its time would be that of eager mode.
        warnings.filterwarnings("error", message=".*uncompiled")
        yield from _compared(setting, int(side), sides, (("compiled_engine", "compiled"),))


def background(setting: Setting, side: str) -> Iterator[Row]:
    """Time the first step, and measure when steps begin to use compiled code: with an empty cache, then a full one."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for cache in ("empty", "full"):
            # Otherwise the second run would take the code from this process, not from the cache on disk.
            forget_code()
            yield tried(f"{side} px, {cache} cache", partial(_change_over, setting, int(side)), setting.device)
            free(setting.device)


def _change_over(setting: Setting, side_px: int) -> Row:
    """Train until all segments are compiled in the background, or half of the remaining time is over; return times."""
    images, labels = batch(setting, side_px)
    engine = engine_of(setting, side_px, _one_rank(), AloneCommunicator(), compile="on")
    if engine.segments is None:
        return {"not compiled": "there is no compiler here"}
    engine.segments.work_in_background()
    begin_s, times, stop_s = time.monotonic(), list[float](), setting.seconds_left / 2
    while not times or not (engine.segments.idle or times[-1] > stop_s):
        engine.train_step(images, labels)
        finish(setting.device)
        times.append(time.monotonic() - begin_s)
    row: Row = {"first_step_s": times[0], "segments": engine.segments.segments, "steps": len(times)}
    return row | ({"compiled_after_s": times[-1]} if engine.segments.idle else {"not compiled": f"{times[-1]:.0f} s"})


def plain_step(setting: Setting, side_px: int, compiled: bool = False) -> StepBody:
    """Return a training step of plain PyTorch."""
    images, labels = batch(setting, side_px)
    model = network(setting)
    optimizer, forward = _sgd(list(model.parameters())), torch.compile(model) if compiled else model

    def step() -> None:
        with torch.autocast(setting.device.type, setting.autocast):
            loss = F.cross_entropy(forward(images), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_step(setting: Setting, side_px: int, compiled: bool = False, cuda_graphs: GraphMode = "auto") -> StepBody:
    """Return a training step of the engine on one rank."""
    images, labels = batch(setting, side_px)
    compile: CompileMode = "on" if compiled else "off"
    engine = engine_of(setting, side_px, _one_rank(), AloneCommunicator(), None, compile, cuda_graphs)
    return lambda: engine.train_step(images, labels)


def _compared(
    setting: Setting, side_px: int, sides: Mapping[str, Callable[[], StepBody]], pairs: Sequence[tuple[str, str]]
) -> Iterator[Row]:
    """Time the steps of each side: yield a row for each, then one with the ratios of ``pairs``.

    Args:
        setting: The device and the sizes.
        side_px: Height and width of the image.
        sides: Name -> a function that makes the step that is timed.
        pairs: Names of sides (a, b), for the ratio of a's time to b's.
    """
    seconds: dict[str, float] = {}
    for name, make in sides.items():

        def measured(make: Callable[[], StepBody] = make) -> Row:
            """Return the seconds of the first step of this side, and of a later one."""
            step = make()
            begin_s = time.perf_counter()
            step()
            finish(setting.device)
            first_s = time.perf_counter() - begin_s
            return {"step_s": step_s(step, setting.device, setting.sizes.steps), "first_step_s": first_s}

        row = tried(f"{name} at {side_px} px", measured, setting.device)
        seconds |= {name: row["step_s"]} if "step_s" in row else {}
        yield row
        free(setting.device)
    ratios = {f"{a}_to_{b}": seconds[a] / seconds[b] for a, b in pairs if {a, b} <= seconds.keys()}
    if ratios:
        yield {"what": f"{setting.sizes.network}, {side_px} px", **ratios}


def staged(setting: Setting, _: str) -> Iterator[Row]:
    """Time two ranks that share a device, whose messages go through host memory, against one rank."""
    comm, side_px = hyfi_core.init(), setting.sizes.staged_px
    images, labels = batch(setting, side_px)
    one_rank_s = 0.0
    if comm.rank == 0:
        engine = engine_of(setting, side_px, _one_rank(), AloneCommunicator())
        one_rank_s = step_s(lambda: engine.train_step(images, labels), setting.device, setting.sizes.steps)
    # Rank 1 waits here until rank 0 has measured one rank on a GPU that is otherwise idle.
    comm.barrier()
    shared = engine_of(setting, side_px, hyfi_core.ParallelPlan(grids=((2, 1),)), comm)
    shared_s = step_s(lambda: shared.train_step(images, labels), setting.device, setting.sizes.steps)
    if comm.rank == 0:
        times = {"one_rank_s": one_rank_s, "two_ranks_s": shared_s, "two_ranks_to_one": shared_s / one_rank_s}
        yield {"what": f"two ranks on one device, {side_px} px", **times}


@dataclass(frozen=True)
class NoiseSamples:
    """Samples of noise, cut from one image in memory: decoding takes no time."""

    side_px: int

    def source(self, index: int, box: Box, epoch: int | None) -> Box:
        """Return the box itself."""
        return box

    def read_plain(self, index: int, box: Box) -> npt.NDArray[np.uint8]:
        """Return noise, the same for every sample."""
        noise = np.random.default_rng(0).integers(0, 256, (3, 256, 256), dtype=np.uint8)
        rows, columns = (-(-side // 256) for side in box.shape)
        return np.tile(noise, (1, rows, columns))[:, : box.shape[0], : box.shape[1]]

    def vary(self, index: int, epoch: int | None, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return the pixels unchanged."""
        return pixels


def feed(setting: Setting, _: str) -> Iterator[Row]:
    """Time steps on images from a loader against steps on an image on the device, and how long the trainer waits."""
    comm, side_px, steps = hyfi_core.init(), setting.sizes.speed_px[0], setting.sizes.steps
    # The feed has one turn for each call of `fed_step` below.
    turns, layout, stream = (0, UNTIMED_STEPS + steps), BatchLayout.uniform(1), SampleStream(n=8, seed=0)
    if comm.rank:
        LoaderService(comm, [0], NoiseSamples(side_px), stream, layout, workers=2).serve()
        return
    engine = engine_of(setting, side_px, _one_rank(), AloneCommunicator())
    images, labels = batch(setting, side_px)
    resident_s = step_s(lambda: engine.train_step(images, labels), setting.device, steps)
    spec = FeedSpec(stream, layout, 0, (InputPart(Box.of_size(side_px, side_px), 0, 1),), turns)
    source, numbers = RemoteFeed(comm, [1], spec, prefetch=2, device=setting.device), iter(range(*turns))
    waits: list[float] = []

    def fed_step() -> None:
        before_s = source.wait_s
        engine.train_step(BatchImages(source.batch(next(numbers)), _normalised), labels)
        waits.append(source.wait_s - before_s)

    fed_s = step_s(fed_step, setting.device, steps)
    source.close(stopped=False)
    # The timed steps only: before the first step, nothing was sent ahead.
    wait_s = sum(waits[-steps:]) / steps
    times = {"resident_s": resident_s, "fed_s": fed_s, "fed_to_resident": fed_s / resident_s, "wait_s": wait_s}
    yield {"what": f"images from a loader, {side_px} px", **times}


def _normalised(pixels: torch.Tensor) -> torch.Tensor:
    return Normalisation()(pixels, memory_format=torch.channels_last)


def _one_rank() -> hyfi_core.ParallelPlan:
    return hyfi_core.ParallelPlan(grids=((1, 1),))
