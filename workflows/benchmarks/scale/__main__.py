"""Benchmark of planning for many ranks: what one rank computes between the captured model and its first message.

    python -m workflows.benchmarks.scale [--model resnet50] [--size 16384] [--most 2048]

The model is captured once. For each plan, an inner rank lowers its stage (fused halos chosen by cost), plans its
boundary transfers, and lowers and validates the schedule of all ranks, in a process of its own. No message is sent and
no image is allocated. Then 64 ranks (threads of this process) train a network of almost no work: processor time of a
rank's own thread in a step, beside that of plain PyTorch. Sleeping until other ranks arrive takes no processor; waking
up, and the threads' stand-in for messages, are counted. The start of all ranks of the largest plan is modelled
(:mod:`workflows.benchmarks.scale.startup`). Prints a table; its last line has two numbers: seconds (of processor) and
MB (10^6 bytes, growth of the peak of resident memory) of one rank's planning for the plan with the most ranks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.cost.search.cuts import with_cuts
from hyfi_core.models import amoebanet, resnet
from hyfi_core.plan.batch_shapes import BatchShapes
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.process_memory import forget_peak, peak_bytes, resident_bytes
from hyfi_core.runtime.lower_model import lower_model
from hyfi_core.runtime.settings import EngineSettings
from hyfi_core.runtime.subject import RandomKey, Subject
from hyfi_core.schedule.generate import generate
from hyfi_core.schedule.lower import lower
from hyfi_core.schedule.simulate import validate
from workflows.benchmarks.scale.startup import measured_imports, startup

PLANS = (
    ParallelPlan(grids=((2, 2),)),
    ParallelPlan(grids=((8, 8),)),
    ParallelPlan(grids=((16, 16),)),
    ParallelPlan(grids=((16, 16),) * 4, microbatches=8, schedule="1f1b"),
    ParallelPlan(grids=((16, 16),) * 4, microbatches=8, schedule="chimera"),
    ParallelPlan(grids=((32, 32),)),
    ParallelPlan(grids=((32, 32),) * 2, microbatches=8, schedule="1f1b"),
    ParallelPlan(grids=((32, 64),)),
)
STEP_RANKS = 64
_STEPS = 50


@dataclass(frozen=True)
class Planned:
    """What one rank's planning took.

    Attributes:
        lowering_s: Seconds to lower its stages and the transfers at their boundaries.
        schedule_s: Seconds to make the schedule of all ranks and to validate it.
        growth_mb: Growth of the peak of resident memory, in megabytes.
        instructions: Number of instructions of this rank, over its stages.
    """

    lowering_s: float
    schedule_s: float
    growth_mb: float
    instructions: int


class _OneOfMany(AloneCommunicator):
    """Stands for one rank of many before its first message: every rank has the same program."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank


def main() -> None:
    """Print what planning costs for each plan, what a step costs its ranks, and the parts of a start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="resnet50", help="a function of hyfi_core.models.resnet, resnet1001 or amoebanet"
    )
    parser.add_argument("--size", type=int, default=16384)
    parser.add_argument("--most", type=int, default=2048, help="largest number of ranks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = _model(args.model)
    # Before the clock starts.
    capture(nn.Conv2d(3, 3, 1), (1, 3, 8, 8), torch.float32)  # the first export imports much of PyTorch
    before, begun = peak_bytes(), time.process_time()
    program = capture(model, (1, 3, args.size, args.size), torch.float32)
    captured_s, growth = time.process_time() - begun, (peak_bytes() - before) / 1e6
    print(f"{args.model} at {args.size} x {args.size}, captured once: {captured_s:.1f} s of processor, {growth:.0f} MB")
    print(f"{'ranks':>6}  {'plan':<28} {'lowering (s)':>12} {'schedule (s)':>12} {'memory (MB)':>12} {'calls':>6}")
    # `plan` and `last` are those of the most ranks after the loop.
    for plan in (plan for plan in PLANS if plan.ranks <= max(4, args.most)):
        last = planned_in_child(model, program, with_cuts(plan, program))
        print(
            f"{plan.ranks:>6}  {_named(plan):<28} {last.lowering_s:>12.2f} {last.schedule_s:>12.2f} "
            f"{last.growth_mb:>12.1f} {last.instructions:>6}",
            flush=True,
        )
    cost = step_ms()
    print(
        f"a step of almost no work, {STEP_RANKS} ranks: {cost.rank_ms:.2f} ms of processor a rank (median; largest "
        f"{cost.largest_ms:.2f}, process over ranks {cost.process_ms:.2f}), plain {cost.plain_ms:.2f}: "
        f"{cost.rank_ms - cost.plain_ms:.2f} beside compute"
    )
    weights = sum(parameter.nbytes for parameter in model.parameters())
    planning_s = captured_s + last.lowering_s + last.schedule_s
    parts = startup(plan, load_machine("h100"), measured_imports(), planning_s, weights)
    print(f"start of {plan.ranks} ranks, modelled: {sum(part.seconds for part in parts):.1f} s")
    for part in parts:
        print(f"  {part.name:<20} {part.seconds:>7.2f} s  {part.source}")
    # For programs that read the last line: the seconds and MB of planning for the most ranks.
    print(f"{last.lowering_s + last.schedule_s:.2f} {last.growth_mb:.1f}")


def _model(name: str) -> nn.Module:
    """Return a network by its name."""
    if name == "amoebanet":
        return amoebanet.amoebanet_d(2)
    if name == "resnet1001":
        return resnet.resnet_v2(1001, classes=2)
    model: nn.Module = getattr(resnet, name)(2)
    return model


def planned_in_child(model: nn.Module, program: Program, plan: ParallelPlan) -> Planned:
    """Return the result of `planned` in a child process, for the rank in the middle of the first grid.

    A rank in the middle has neighbours, and so halos, on all sides.
    """
    rows, columns = plan.grids[0]
    rank = rows // 2 * columns + columns // 2
    # A process for each plan: memory of one does not count for the next. Forked: the program cannot be pickled.
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=lambda: theirs.send(planned(model, program, plan, rank)))
    child.start()
    # While this process has the sending end open, too, `recv` would wait forever for a child that died.
    theirs.close()
    result: Planned = ours.recv()
    child.join()
    return result


def planned(model: nn.Module, program: Program, plan: ParallelPlan, rank: int) -> Planned:
    """Compute all that ``rank`` needs before its first message, and return what that took."""
    # The peak of the parent process is inherited.
    forget_peak()
    before, begun = resident_bytes(), time.process_time()
    placement = Placement.of(plan)
    batch, channels, height, width = program.values[program.image].shape
    shapes = BatchShapes.of(plan, (batch * plan.microbatches, channels, height, width))
    subject = Subject.of(model, EngineSettings(), shapes, RandomKey(0))
    lowered_model = lower_model(subject, program, plan, placement, _OneOfMany(rank))
    # Transfers are planned when they are first asked for: ask for all that this rank sends or receives.
    for (source, target), boundary in lowered_model.boundaries.items():
        for (stage, _direction), hosted in lowered_model.hosted.items():
            for back in (False, True):  # activations; gradients, which go the other way
                if stage == source:
                    boundary.outgoing(hosted.position, back)
                if stage == target:
                    boundary.incoming(hosted.position, back)
    lowered = time.process_time()
    edges = tuple(lowered_model.boundaries)
    schedule = lower(generate(plan, placement), placement, edges, mirror=plan.mirror)
    validate(schedule, placement, edges, mirror=plan.mirror)
    ended = time.process_time()
    calls = sum(len(hosted.ranked.instructions) for hosted in lowered_model.hosted.values())
    growth_mb = (peak_bytes() - before) / 1e6
    return Planned(lowering_s=lowered - begun, schedule_s=ended - lowered, growth_mb=growth_mb, instructions=calls)


@dataclass(frozen=True)
class StepCost:
    """Processor milliseconds of a step of almost no work.

    Attributes:
        rank_ms: Time of a rank's thread, the median over all ranks.
        largest_ms: Time of the thread that takes most.
        process_ms: Time of the whole process, divided by the number of ranks.
        plain_ms: Time of plain PyTorch on the whole image.
    """

    rank_ms: float
    largest_ms: float
    process_ms: float
    plain_ms: float


def step_ms() -> StepCost:
    """Measure a step of almost no work on many ranks, and in plain PyTorch."""
    images, labels = torch.rand(1, 3, 64, 64), torch.tensor([1])

    def train(comm: Communicator) -> tuple[float, float]:
        engine = hyfi_core.parallelize(
            _almost_nothing(), (1, 3, 64, 64), ParallelPlan(grids=((8, 8),)), comm, optimizer=_sgd, verify=False
        )
        return _timed_ms(lambda: engine.train_step(images, labels), comm)

    model = _almost_nothing()
    optimizer = _sgd(list(model.parameters()))

    def plain() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    times = run_ranks(STEP_RANKS, train)
    rank_ms, all_ranks_ms = [of_rank for of_rank, _ in times], times[0][1]
    return StepCost(
        rank_ms=statistics.median(rank_ms),
        largest_ms=max(rank_ms),
        process_ms=all_ranks_ms / STEP_RANKS,
        plain_ms=_timed_ms(plain, AloneCommunicator())[0],
    )


def _almost_nothing() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _timed_ms(step: Callable[[], object], comm: Communicator) -> tuple[float, float]:
    """Return the milliseconds of processor time of a step after warm-up: (of this rank, a thread; of all ranks)."""
    for _ in range(3):
        step()
    comm.barrier()
    # Processor time, because waiting for other ranks takes none of it.
    process_start_s, thread_start_s = time.process_time(), time.thread_time()
    for _ in range(_STEPS):
        step()
    thread_s = time.thread_time() - thread_start_s
    comm.barrier()  # the process's time is complete when all ranks are done
    process_s = time.process_time() - process_start_s
    return thread_s / _STEPS * 1e3, process_s / _STEPS * 1e3


def _named(plan: ParallelPlan) -> str:
    (rows, columns), stages = plan.grids[0], plan.stages
    return f"{rows} x {columns}" if stages == 1 else f"{stages} stages of {rows} x {columns}, {plan.schedule}"


if __name__ == "__main__":
    main()
