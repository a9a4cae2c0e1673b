"""The images of a step that batch norm normalises together, which change if a run is resumed with another plan.

Everything else in a step is the same for any number of replicas and micro-batches: the order of the slides, random
numbers, the loss over the whole batch. In a batch of 8 images, those with the same number are normalised together::

    image                                0 1 2 3 4 5 6 7
    1 replica,  4 micro-batches          0 0 1 1 2 2 3 3
    2 replicas, 2 micro-batches of each  0 0 1 1 2 2 3 3     the same images together
    2 replicas, 1 micro-batch of each    0 0 0 0 1 1 1 1
    the same with plan.sync_batch_norm   0 0 0 0 0 0 0 0
"""

from __future__ import annotations

from itertools import chain

from workflows.config.load import Config
from workflows.console import counted

_ADVICE = "model.norm=group or frozen does not depend on the plan"


def norm_batches(config: Config) -> list[list[tuple[int, ...]]]:
    """Return the groups of images that are normalised together in a step, for each replica with its own statistics.

    ``[[(0, 1), (2, 3)], [(4, 5), (6, 7)]]``: two replicas with two micro-batches each. Running statistics are those of
    the first replica.

    Args:
        config: The configuration of a run.
    """
    plan, batch = config.plan, config.data.batch_size
    if config.roles.design == "offload_naive":  # replicas divide each micro-batch, and batch norms are synchronised
        size = batch // plan.microbatches
        return [[tuple(range(first, first + size)) for first in range(0, batch, size)]]
    size = batch // plan.replicas // plan.microbatches
    replicas = [
        [tuple(range(first, first + size)) for first in range(start, start + size * plan.microbatches, size)]
        for start in range(0, batch, batch // plan.replicas)
    ]
    if not plan.sync_batch_norm:
        return replicas
    # Synchronised: the k-th micro-batches of all replicas run at the same time, and are normalised together.
    return [[tuple(image for part in parts for image in part) for parts in zip(*replicas, strict=True)]]


def describe_norm_change(before: Config, after: Config, step: int) -> str | None:
    """Return how batch norm changes when a run is resumed with another plan; None if it does not.

    Args:
        before: The configuration of the run until now.
        after: The configuration of the resumed run.
        step: The step after which it continues.
    """
    batches_before, batches_after = norm_batches(before), norm_batches(after)
    if batches_before == batches_after:
        return None
    if sorted(chain(*batches_before)) != sorted(chain(*batches_after)):
        was, are = len(batches_before[0][0]), len(batches_after[0][0])
        other_images = f"other {are} images together than before"
        images_text = other_images if was == are else f"{counted(are, 'image')} together, {was} before"
        return (
            f"batch norm normalises {images_text} (plan.replicas, plan.microbatches, plan.sync_batch_norm): from step "
            f"{step + 1} on, this is not the run that it would have been without the change; {_ADVICE}"
        )
    # The same groups, divided among other replicas: gradients stay, but the first replica, whose statistics count, has
    # others.
    images = [sum(map(len, replicas[0])) for replicas in (batches_before, batches_after)]
    return (
        f"running statistics of batch norm, used in validation and prediction, are from step {step + 1} on those of "
        f"{images[1]} images of each step, of {images[0]} before (plan.replicas: those of the first replica); "
        f"{_ADVICE}"
    )
