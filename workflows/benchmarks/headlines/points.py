"""Figures that papers and repositories report, and the plans that stand for their systems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from hyfi_core.plan.parallel_plan import ParallelPlan, ScheduleName
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.generate import generate
from hyfi_core.schedule.lower import lower
from hyfi_core.schedule.simulate import Costs, simulate
from workflows.benchmarks.headlines.forecasts import Forecasts

LASSEN, P40 = "v100-lassen", "p40"


@dataclass(frozen=True)
class Point:
    """One published figure.

    Attributes:
        source: Paper or repository.
        what: The quantity.
        published: The published value.
        setting: Network, images, ranks and schedule.
        stated: Whether the source states that setting; otherwise it is assumed.
        modelled: Returns the same quantity from forecasts.
    """

    source: str
    what: str
    published: float
    setting: str
    stated: bool
    modelled: Callable[[Forecasts], float]


def points() -> list[Point]:
    """Return all points, those with a stated setting first."""
    return [*_formulas(), *_torchgpipe_amoebanet(), *_torchgpipe_resnet(), *_hy_fi(), *_mpi4dl(), *_gems()]


def _formulas() -> list[Point]:
    """Return bubbles that do not depend on hardware, as the papers' formulas give them for settings that they state.

    GEMS: 32 repetitions. Chimera: as many micro-batches as stages, and twice as many.
    """
    points = []
    for stages in (4, 8, 16):
        setting = f"{stages} stages, 32 repetitions, backward = 2 forwards"
        # A repetition has two micro-batches, one in each direction.
        model = partial(_bubble, schedule="gems_master", stages=stages, microbatches=64, backward_s=2.0)
        points.append(Point("GEMS", "bubble", (stages - 1) / (stages + 0.5), setting, stated=True, modelled=model))
    for stages in (4, 8, 16):
        for microbatches in (stages, 2 * stages):
            setting = f"{stages} stages, {microbatches} micro-batches, backward = forward"
            model = partial(_bubble, schedule="chimera", stages=stages, microbatches=microbatches, backward_s=1.0)
            published = (stages - 2) / (2 * microbatches + stages - 2)
            points.append(Point("Chimera", "bubble", published, setting, stated=True, modelled=model))
    return points


def _bubble(_: Forecasts, schedule: ScheduleName, stages: int, microbatches: int, backward_s: float) -> float:
    """Return the bubble of a schedule with balanced stages, a forward of 1 s and free messages."""
    plan = ParallelPlan(grids=((1, 1),) * stages, microbatches=microbatches, schedule=schedule)
    placement, edges = Placement.of(plan), tuple((stage, stage + 1) for stage in range(stages - 1))
    lowered = lower(generate(plan, placement), placement, edges, mirror=plan.mirror)
    costs = Costs(backward_s=backward_s)
    return simulate(lowered, placement, edges, mirror=plan.mirror, microbatches=microbatches, costs=costs).bubble


# torchgpipe's benchmarks/amoebanetd-speed: (micro-batches, batch, layers of each stage, images/s). The 24 layers are
# the stem, 22 cells of the network and the head.
_AMOEBANET = (
    (1, 96, (7, 17), 26.733),
    (4, 256, (9, 15), 41.133),
    (32, 1280, (9, 15), 47.386),
    (1, 160, (3, 4, 5, 12), 26.827),
    (4, 360, (3, 6, 7, 8), 44.543),
    (32, 1152, (3, 6, 7, 8), 72.412),
    (1, 196, (2, 2, 2, 2, 2, 3, 4, 7), 24.918),
    (4, 480, (2, 2, 2, 3, 3, 4, 4, 4), 70.065),
    (32, 1280, (2, 2, 2, 3, 3, 4, 4, 4), 132.413),
)


def _torchgpipe_amoebanet() -> list[Point]:
    """Return the figures of torchgpipe for AmoebaNet."""
    points = []
    for microbatches, batch, balance, published in _AMOEBANET:
        ends = list(accumulate(balance))[:-1]
        plan = ParallelPlan(
            grids=((1, 1),) * len(balance),
            # Their layer 0 is the stem: after n layers, the last cell has number n − 2.
            cuts=tuple(f"cells.{end - 2}" for end in ends),
            microbatches=microbatches,
            schedule="gpipe",
            recompute=True,
        )

        def modelled(forecasts: Forecasts, plan: ParallelPlan = plan, batch: int = batch) -> float:
            network, but_last = "AmoebaNet-D (18, 256)", plan.microbatches > 1
            return batch / forecasts.torchgpipe_step_s(network, 224, batch, plan, P40, but_last)

        setting = f"AmoebaNet-D (18, 256), 224², {len(balance)} P40, {microbatches} micro-batches, batch {batch}"
        points.append(Point("torchgpipe", "images/s", published, setting, stated=True, modelled=modelled))
    return points


# torchgpipe's benchmarks/resnet101-speed: (micro-batches, images of each, cuts, images/s). Its 370 layers are cut where
# ours are: after a block, or within it after the same norm. Long runs of micro-batches are simulated up to 200.
_RESNET = (
    (2, 110, (), 81.796),
    (200, 15, ("layer3.4",), 135.539),
    (200, 22, ("layer2.0.bn2", "layer3.4", "layer3.16.bn1"), 265.958),
    (150, 36, ("layer1.1", "layer2.0", "layer2.3", "layer3.3", "layer3.7", "layer3.13", "layer3.19"), 411.662),
)


def _torchgpipe_resnet() -> list[Point]:
    """Return the figures of torchgpipe for ResNet-101; its benchmarks state their settings."""
    network = "ResNet-101"

    def one_gpu(forecasts: Forecasts) -> float:
        return 118 / forecasts.step_s(network, 224, 118, ParallelPlan(grids=((1, 1),)), P40)

    points = [
        Point(
            "torchgpipe", "images/s", 95.862, f"{network}, 224², 1 P40, plain, batch 118", stated=True, modelled=one_gpu
        )
    ]
    for microbatches, images, cuts, published in _RESNET:
        plan = ParallelPlan(
            grids=((1, 1),) * (len(cuts) + 1),
            cuts=cuts or "auto",
            microbatches=microbatches,
            schedule="gpipe",
            recompute=True,
        )

        def modelled(forecasts: Forecasts, plan: ParallelPlan = plan, images: int = images) -> float:
            batch = images * plan.microbatches
            # torchgpipe does not recompute the last micro-batch.
            return batch / forecasts.torchgpipe_step_s(network, 224, batch, plan, P40, but_last=True)

        setting = f"{network}, 224², {len(cuts) + 1} P40, micro-batches of {images}"
        points.append(Point("torchgpipe", "images/s", published, setting, stated=True, modelled=modelled))
    return points


# The smallest legal group of Hy-Fi: 5 stages, the first over 2 x 2 ranks, two directions, 2 micro-batches. On equal
# hardware, layer and pipeline parallelism have 8 stages.
_GROUP = ((2, 2), (1, 1), (1, 1), (1, 1), (1, 1))
_STAGES = ((1, 1),) * 8
SMALL, LARGE = "AmoebaNet-D (18, 416)", "AmoebaNet-D (18, 208)"

LAYER = ParallelPlan(grids=_STAGES, schedule="sequential", microbatches=2)
PIPELINE = ParallelPlan(grids=_STAGES, schedule="gpipe", microbatches=2)
HY_FI = ParallelPlan(grids=_GROUP, schedule="chimera", microbatches=2)
BASIC_SPATIAL = ParallelPlan(grids=_GROUP, schedule="sequential", microbatches=2, fused_halo=1)


def ratio(forecasts: Forecasts, network: str, size: int, slow: ParallelPlan, fast: ParallelPlan) -> float:
    """Return the seconds of ``slow`` divided by those of ``fast``, for two images on V100s."""
    slow_s, fast_s = (forecasts.step_s(network, size, 2, plan, LASSEN) for plan in (slow, fast))
    return slow_s / fast_s


def scaling(forecasts: Forecasts, network: str, size: int, images: int, plan: ParallelPlan, ranks: int) -> float:
    """Return the scaling efficiency: images/s of ``ranks`` ranks / (images/s of one replica × number of replicas).

    Each replica has ``images`` images, so this is the seconds of a step of one replica / those of all.
    """
    replicas = ranks // plan.ranks_per_replica
    single, many = (
        forecasts.step_s(network, size, images, replace(plan, replicas=count), LASSEN) for count in (1, replicas)
    )
    return single / many


def _hy_fi() -> list[Point]:
    """Return the figures of the Hy-Fi paper."""
    group = "2 images on 8 V100 (assumed: 5 stages, the first on 2 x 2; layer, pipeline: 8 stages)"
    points = []
    for figure, published, network, size, slow, fast in (
        ("pipeline over layer", 1.589, SMALL, 2048, LAYER, PIPELINE),
        ("over layer", 2.67, SMALL, 2048, LAYER, HY_FI),
        ("over pipeline", 1.68, SMALL, 2048, PIPELINE, HY_FI),
        ("over basic spatial", 1.476, LARGE, 8192, BASIC_SPATIAL, HY_FI),
        ("over basic spatial", 1.47, LARGE, 16384, BASIC_SPATIAL, HY_FI),
    ):
        model = partial(ratio, network=network, size=size, slow=slow, fast=fast)
        points.append(Point("Hy-Fi", figure, published, f"{network}, {size}², {group}", stated=False, modelled=model))
    at_2048 = partial(scaling, network=SMALL, size=2048, images=2, plan=HY_FI, ranks=2048)
    points.append(Point("Hy-Fi", "scaling at 2,048", 0.945, f"{SMALL}, 2048², {group}", stated=False, modelled=at_2048))
    return points


def _mpi4dl() -> list[Point]:
    """Return the figures of MPI4DL, read from the repository's charts to 0.05 images/s.

    Where a chart shows a range, its middle counts. The titles of two charts look swapped.
    """
    parts = ((2, 2), (1, 1))
    systems = {
        "layer parallel": ParallelPlan(grids=((1, 1),) * 2, schedule="sequential"),
        "halo D1": ParallelPlan(grids=parts, schedule="sequential", fused_halo=1),
        "halo D2": ParallelPlan(grids=parts, schedule="sequential"),
    }
    charts = (("layer parallel", 0.95, 1.3), ("halo D1", 1.125, 1.5), ("halo D2", 2.125, 2.725))
    points = []
    for name, *published in charts:
        for images, rate in enumerate(published, 1):
            model = partial(_images_per_s, images=images, plan=systems[name])
            setting = f"{LARGE}, 2048² (assumed), batch {images}, {systems[name].ranks} V100"
            points.append(Point("MPI4DL", f"images/s, {name}", rate, setting, stated=False, modelled=model))
    return points


def _images_per_s(forecasts: Forecasts, images: int, plan: ParallelPlan) -> float:
    return images / forecasts.step_s(LARGE, 2048, images, plan, LASSEN)


def _gems() -> list[Point]:
    plan = ParallelPlan(grids=((1, 1),) * 4, schedule="gems_mast", microbatches=2)
    model = partial(scaling, network="ResNet-1001", size=1024, images=2, plan=plan, ranks=1024)
    setting = "ResNet-1001, 1024², 2 images, 4 stages (assumed)"
    return [Point("GEMS", "scaling at 1,024", 0.9732, setting, stated=False, modelled=model)]


NOT_MODELLED = {
    "HyPar-Flow 110 x on 128 nodes, 481 x on 512": "batch and grid of a node are not stated; no model of its CPU nodes",
    "Hy-Fi 2.26 x by strong scaling": "the numbers of GPUs are not stated",
    "GEMS 7 h to 28 min": "the GPUs of both runs are not confirmed",
    "S-Caffe 2.5 x": "GoogLeNet on K80s: neither the network nor the machine is here",
    "ORNL 22,528² on 2,304 V100": "no time is published",
}
"""Published figures without a forecast, and why."""
