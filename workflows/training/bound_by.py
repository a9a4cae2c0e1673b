"""A breakdown of training time, what bounds it, and which setting to change: one line for each epoch.

::

    step            |compute|compile|halo|stage|reduce|spill|wait| seconds of the step itself
    between steps   |validation|save|                              counted in the next step's record

``halo``, ``stage`` and ``reduce`` are the seconds in which this rank only communicated or waited for other ranks;
communication that overlaps with computation is not counted. ``spill`` is waiting for maps on their way to and from
``plan.spill``, ``wait`` is waiting for images, ``compile`` is compiling segments. The rest is ``compute``.

::

    rank 0   |compute·········|halo|wait for rank 1|          a rank that waits for data makes all others wait in
    rank 1   |wait for data···|compute·········|halo|         their exchanges; the cost of the messages themselves is
                                                              the time of the rank that spends least on them
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `hyfi status` needs no torch
    from hyfi_core.comm.base import Communicator


KINDS = ("compute", "compile", "halo", "stage", "reduce", "spill", "wait", "validation", "save")
MESSAGES = ("halo", "stage", "reduce")
OF_THE_SLOWEST = ("compile", "spill", "wait", "validation", "save")
"""Kinds for which the trainer that spends most counts, because the others wait for it."""
MIN_SHARE = 0.15
"""If every kind other than computing takes a smaller fraction of the time, computing bounds training."""

NAMES = {
    "compute": "computing",
    "compile": "compiling",
    "spill": "spilling",
    "wait": "waiting",
    "validation": "validating",
    "save": "saving",
    "halo": "exchanging halos",
    "stage": "between stages",
    "reduce": "reducing",
    "imbalance": "waiting for slower ranks",
}

Spent = dict[str, float]


class StepTime:
    """The times of one trainer by kind, summed up for each step and each epoch."""

    def __init__(self) -> None:
        self._now = dict.fromkeys(KINDS, 0.0)
        self._epoch = dict.fromkeys(KINDS, 0.0)
        self._counted_in_epoch = dict.fromkeys(KINDS, 0.0)
        self._interval = dict.fromkeys(KINDS, 0.0)

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add seconds to their kinds; unknown kinds are ignored."""
        for kind, spent in seconds.items():
            if kind in self._now:
                self._now[kind] += spent

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Context manager that adds its duration to one kind."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._now[kind] += time.perf_counter() - start_s

    def end_step(self, seconds: float) -> Spent:
        """Return the seconds by kind of a step that took ``seconds``, and of the time before it; start from 0 again.

        The time before it: validation and saving after the previous step.
        """
        spent, self._now = self._now, dict.fromkeys(KINDS, 0.0)
        # Validation and saving happen between steps: they are not within `seconds`.
        measured = spent["compile"] + spent["wait"] + spent["spill"] + sum(spent[kind] for kind in MESSAGES)
        # Not below 0: the parts are measured by several clock readings, and may add up to a little more than the whole.
        spent["compute"] = max(0.0, seconds - measured)
        for kind in KINDS:
            # Time after an epoch's last step was counted in that epoch already, by `end_epoch`.
            self._epoch[kind] += spent[kind] - self._counted_in_epoch[kind]
            self._interval[kind] += spent[kind]
        self._counted_in_epoch = dict.fromkeys(KINDS, 0.0)
        return spent

    def end_epoch(self, trainers: Communicator) -> list[Spent] | None:
        """Return every trainer's time by kind in this epoch, on rank 0; None elsewhere (collective).

        Time after the last step belongs to this epoch, although it is in the next step's record.
        """
        mine = {kind: self._epoch[kind] + self._now[kind] for kind in KINDS}
        self._epoch = dict.fromkeys(KINDS, 0.0)
        # `_now` stays, for the record of the next step; `end_step` must not count it again in the next epoch.
        self._counted_in_epoch = dict(self._now)
        return trainers.gather_objects(mine)

    def end_interval(self) -> Spent:
        """Return the seconds by kind of the steps since the last call; start from 0 again."""
        mine, self._interval = self._interval, dict.fromkeys(KINDS, 0.0)
        return mine

    def discard(self) -> None:
        """Discard the times so far: those of the first step, which captures the model."""
        self._epoch, self._interval = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)


@dataclass(frozen=True)
class RunSetup:
    """The settings that affect the advice.

    Attributes:
        ranks, loaders, validators: Number of ranks of each role; ``ranks``: trainers.
        policy: ``all`` or ``latest``.
        spare_train: Whether spare ranks train, so that none is left to load or validate.
        planes: Number of planes of each replica.
        tiles: Whether slides are bags of tiles.
        free_cores: Whether this node has cores beside those of the trainers.
    """

    ranks: int
    loaders: int
    validators: int
    policy: str
    spare_train: bool = False
    planes: int = 1
    tiles: bool = False
    free_cores: bool = True


def shares(spent: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each kind's fraction of an epoch, from the times of all trainers.

    Each kind in ``OF_THE_SLOWEST`` is the fraction of the rank that spends most on it, because all others wait for that
    rank. ``halo`` and ``reduce`` are the fractions of the rank that spends least on them, which is the cost of the
    messages; the time that others spend beyond that is ``imbalance``. ``compute`` and ``stage`` are means.
    """
    # A trainer without any time counts as 0 in each kind, rather than dividing by 0.
    totals = [sum(times.values()) or math.inf for times in spent]

    def parts(kind: str) -> list[float]:
        return [times[kind] / total for times, total in zip(spent, totals, strict=True)]

    def mean(kind: str) -> float:
        return sum(parts(kind)) / len(spent)

    # All ranks of an exchange end it together: the last to arrive only transfers, the others waited for it before.
    halo, reduction = min(parts("halo")), min(parts("reduce"))
    return {
        **{kind: max(parts(kind)) for kind in OF_THE_SLOWEST},
        "compute": mean("compute"),
        "halo": halo,
        "stage": mean("stage"),
        "reduce": reduction,
        "imbalance": mean("halo") + mean("reduce") - halo - reduction,
    }


def percentages(spent: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """Return the breakdown of an epoch in whole percent with the sum 100: the mean of each kind over trainers.

    Message time beyond that of the rank that spends least on messages is counted as waiting for slower ranks.
    """
    # Mean of fractions, not fraction of sums: trainers count alike, however long each was measured.
    counted = [times for times in spent if sum(times.values())]
    if not counted:
        return dict.fromkeys(NAMES, 0)
    parts = [{kind: times[kind] / sum(times.values()) for kind in times} for times in counted]
    mean = {kind: sum(part[kind] for part in parts) / len(parts) for kind in parts[0]}
    least = {kind: min(part[kind] for part in parts) for kind in ("halo", "reduce")}
    exact = {name: least.get(name, mean.get(name, 0.0)) for name in NAMES}
    exact["imbalance"] = sum(mean[kind] - least[kind] for kind in least)
    percents = {name: int(100 * part) for name, part in exact.items()}
    # Largest remainder method: each is off by less than 1, and the sum is 100.
    by_remainder = sorted(exact, key=lambda name: 100 * exact[name] - percents[name], reverse=True)
    for name in by_remainder[: 100 - sum(percents.values())]:
        percents[name] += 1
    return percents


def bound_by(spent: Sequence[Mapping[str, float]], setup: RunSetup) -> str:
    """Return one line: what bounds training, by how much, advice, and the whole breakdown.

    The breakdown is the mean over trainers. If one trainer's share bounds training, and it differs from the mean, the
    line names the trainer.
    """
    shares_of = shares(spent)
    # Computing is the rest of the time: it bounds training only if no other kind takes much.
    most = max((kind for kind in shares_of if kind != "compute"), key=lambda kind: shares_of[kind])
    kind = most if shares_of[most] >= MIN_SHARE else "compute"
    parts = percentages(spent)
    split = ", ".join(f"{NAMES[name]} {part} %" for name, part in parts.items() if part or name == "compute")
    of = f"mean of {len(spent)} trainers: " if len(spent) > 1 else ""
    percent, who = parts[kind], ""
    # One trainer's share may bound all, while the mean that the breakdown shows is small: name it.
    if kind in OF_THE_SLOWEST and round(100 * shares_of[kind]) != percent:
        percent, who = round(100 * shares_of[kind]), f" on trainer {_slowest(spent, kind)}"
    return f"{_verdict(kind, shares_of[kind], f'{percent} % {NAMES[kind]}{who}', setup)} [{of}{split}]"


def _slowest(spent: Sequence[Mapping[str, float]], kind: str) -> int:
    """Return the trainer that spends the largest fraction of its time on ``kind``."""
    parts = [times[kind] / (sum(times.values()) or math.inf) for times in spent]
    return parts.index(max(parts))


_TILE_ADVICE = {
    "compute": ("compute-bound", "more ranks (plan.tiles, plan.replicas) make it faster"),
    "stage": ("bound by features of other ranks", "use fewer ranks for a slide (plan.tiles) and more plan.replicas"),
    "imbalance": ("bound by the slowest rank", "use ranks of equal speed, or more of them for a slide (plan.tiles)"),
}


def _verdict(kind: str, share: float, spends: str, setup: RunSetup) -> str:
    """Return the line about the kind of time that bounds a run, with advice; ``spends`` is its share in words."""
    if setup.tiles and kind in _TILE_ADVICE:
        named, advice = _TILE_ADVICE[kind]
        return f"{named}: {spends}; {advice}"
    named, advice = {
        "compute": ("compute-bound", "more ranks (plan.grids, plan.replicas) make it faster"),
        "wait": ("loader-bound", _loaders(share, setup)),
        "validation": ("validation-bound", _validators(setup)),
        "compile": (
            "compile-bound",
            "a longer run needs it once; run.compile_cache keeps it, run.compile=off omits it",
        ),
        "spill": ("spill-bound", "raise plan.memory_bytes, or use a faster disk (plan.spill)"),
        "save": ("disk-bound", "save less often (run.checkpoint_every_steps, validation.every_steps)"),
        "halo": ("halo-bound", "use fewer parts (plan.grids) or exchange less often (plan.fused_halo)"),
        "stage": _stages(setup),
        "reduce": ("reduction-bound", "raise optimizer.accumulate or data.batch_size"),
        "imbalance": (
            "bound by the slowest rank",
            "use equal parts (plan.grids), ranks of equal speed, or batches by speed (roles.design=offload_naive)",
        ),
    }[kind]
    return f"{named}: {spends}; {advice}"


def _stages(setup: RunSetup) -> tuple[str, str]:
    advice = "raise plan.microbatches, or balance the stages (plan.cuts)"
    if setup.planes == 1:
        return "pipeline-bound", advice
    return "bound by values of other ranks", f"use fewer planes (plan.branches); with several stages, {advice}"


def _loaders(share: float, setup: RunSetup) -> str:
    """Return the advice for trainers that wait for images for this share of the time."""
    if setup.spare_train:
        return "let spare ranks load (roles.design=offload_data) or simpler data.augment"
    if not setup.free_cores:
        return "use simpler data.augment; a loader would take the core of a trainer"
    if setup.loaders == 0:
        return "add a loader (roles.loaders=1) or simpler data.augment"
    # The loaders are always busy, but keep the trainers busy only (1 - share) of the time: scale their number.
    more = max(1, math.ceil(setup.loaders / max(1 - share, 0.1)) - setup.loaders)
    return f"add {more} loader{'s' * (more > 1)} (roles.loaders={setup.loaders + more}) or simpler data.augment"


def _validators(setup: RunSetup) -> str:
    """Return the advice for trainers that wait for validation."""
    if setup.spare_train:
        return "let spare ranks validate (roles.design=offload_validation) or validate less often"
    if not setup.free_cores:
        return "validate less often (validation.every_steps); a validator would take the core of a trainer"
    if setup.validators == 0:
        return "add a validator (roles.validators=1) or validate less often (validation.every_steps)"
    if setup.policy == "all":
        return f"add validators (roles.validators={setup.validators + 1}) or skip some (validation.policy=latest)"
    return "validate less often (validation.every_steps)"
