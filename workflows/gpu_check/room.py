"""Parts of a check: memory of a device, with and without cells, and its forecast."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.cells.budget import free_bytes
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.cost.step.simulator import rank_bytes
from workflows.gpu_check.measure_step import Row, free, step_peak_bytes, step_s, tried
from workflows.gpu_check.setting import Setting
from workflows.gpu_check.speed import batch, engine_of, network

_ONE_RANK = hyfi_core.ParallelPlan(grids=((1, 1),))


def cells(setting: Setting, _: str) -> Iterator[Row]:
    """Measure a step by cells, in memory and spilled with half of the free memory, against one in core."""
    plans = {f"cells {cells}": replace(_ONE_RANK, cells=cells) for cells in setting.sizes.cells}
    finest = setting.sizes.cells[-1]
    # Half of the free memory, so that maps have to leave the GPU.
    half = free_bytes(setting.device) // 2
    plans[f"cells {finest}, spilled"] = replace(_ONE_RANK, cells=finest, spill="memory", memory_bytes=half)
    yield from _against_in_core(setting, setting.sizes.speed_px[-1], plans, "cells")


def pieces(setting: Setting, side: str) -> Iterator[Row]:
    """Measure a step of a model cut into pieces (``interleave``), recomputed one by one, against a step in core.

    In core: all activations stay in the device's memory. Such a step is measured for the sizes in ``speed_px`` only; at
    larger ones, pieces are computed in a few cells as well, because kernels of maps of 2³¹ values and more are slow.
    """
    is_timed_in_core = int(side) in setting.sizes.speed_px
    cells: Literal["auto"] | None = None if is_timed_in_core else "auto"
    plan = replace(_ONE_RANK, interleave=setting.sizes.pieces, recompute=True, cells=cells)
    named = {f"{setting.sizes.pieces} pieces, recomputed": plan}
    yield from _against_in_core(setting, int(side), named, "pieces", in_core=is_timed_in_core)


def _against_in_core(
    setting: Setting, side_px: int, plans: Mapping[str, hyfi_core.ParallelPlan], word: str, *, in_core: bool = True
) -> Iterator[Row]:
    """Measure a step of each plan, and give the ratios of time and memory to a step in core.

    Args:
        setting: The device and the sizes.
        side_px: Height and width of the image.
        plans: The plans by name.
        word: Beginning of the name of the ratio of times, as in ``cells_to_in_core``.
        in_core: Whether the step in core is measured; without it there are no ratios.
    """
    rows: dict[str, Row] = {}
    for name, plan in {**({"in core": _ONE_RANK} if in_core else {}), **plans}.items():
        # The next plan may take longer than those before: it starts only if twice the time of the slowest is left.
        if rows and setting.seconds_left < 2 * max(row.get("took_s", 0.0) for row in rows.values()):
            yield {"what": f"{name}, {side_px} px", "not measured": f"{setting.seconds_left:.0f} s are left"}
            continue

        def measured(plan: hyfi_core.ParallelPlan = plan) -> Row:
            """Return time and memory of a step of this plan."""
            begin_s = time.monotonic()
            images, labels = batch(setting, side_px)
            engine = engine_of(setting, side_px, plan, AloneCommunicator())
            peak_bytes = step_peak_bytes(lambda: engine.train_step(images, labels), setting.device)
            took_s = step_s(lambda: engine.train_step(images, labels), setting.device, setting.sizes.steps)
            row: Row = {"step_s": took_s, "peak_bytes": peak_bytes, "took_s": time.monotonic() - begin_s}
            # Reserved bytes include the memory of CUDA graphs, which the peak of tensors in use does not show.
            return row | ({"reserved_bytes": torch.cuda.memory_reserved()} if setting.device.type == "cuda" else {})

        rows[name] = tried(f"{name}, {side_px} px", measured, setting.device)
        yield rows[name]
        free(setting.device)
    base = rows.get("in core", {})
    for name in plans:
        if "step_s" in base and "step_s" in rows.get(name, {}):
            ratios = {key: rows[name][key] / max(base[key], 1e-9) for key in ("step_s", "peak_bytes")}
            what = f"{setting.sizes.network}, {side_px} px, {name}"
            yield {"what": what, f"{word}_to_in_core": ratios["step_s"], "memory_to_in_core": ratios["peak_bytes"]}


def largest(setting: Setting, how: str) -> Iterator[Row]:
    """Train on larger and larger square images until one does not fit, or the next would take too long.

    ``how``: ``in core``, or anything else for automatic cells that spill to memory.
    """
    by_cells = hyfi_core.ParallelPlan(grids=((1, 1),), cells="auto", spill="memory")
    plan, device = _ONE_RANK if how == "in core" else by_cells, setting.device
    before_s, before_px = 0.0, setting.sizes.ladder_px[0]
    for side_px in setting.sizes.ladder_px:
        # Time grows with the pixels.
        expected_s = before_s * (side_px / before_px) ** 2
        if before_s and expected_s > setting.seconds_left:
            yield {"what": f"{side_px} px, {how}", "would take": f"{expected_s:.0f} s, more than are left"}
            return
        begin_s = time.monotonic()

        def measured(side_px: int = side_px) -> Row:
            model = network(setting)
            engine = engine_of(setting, side_px, plan, AloneCommunicator(), model)
            images, labels = batch(setting, side_px)
            peak_bytes = step_peak_bytes(lambda: engine.train_step(images, labels), device)
            return {"largest_px": side_px, "peak_bytes": peak_bytes, "cells": str(engine.plan.cells)}

        row = tried(f"{setting.sizes.network}, {side_px} px, {how}", measured, device)
        if "failed" in row:
            yield {"what": row["what"], "does not fit": row["failed"]}
            return
        before_s, before_px = time.monotonic() - begin_s, side_px
        yield row
        free(device)


def memory(setting: Setting, _: str) -> Iterator[Row]:
    """Compare the peak memory of a step in float32 with the plan's forecast."""
    for side_px in setting.sizes.forecast_px:

        def measured(side_px: int = side_px) -> Row:
            """Return measured and forecast peak of a step, both with weights."""
            model, (images, labels) = network(setting), batch(setting, side_px)
            shape = (1, 3, side_px, side_px)
            (forecast_bytes,) = rank_bytes(capture(model, shape, torch.float32), _ONE_RANK)
            engine = hyfi_core.parallelize(
                model,
                shape,
                _ONE_RANK,
                AloneCommunicator(),
                optimizer=lambda parameters: torch.optim.AdamW(parameters),
                verify=False,
            )
            weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
            # `step_peak_bytes` leaves out the weights, which exist before the step; the forecast includes them.
            peak_bytes = weights_bytes + step_peak_bytes(lambda: engine.train_step(images, labels), setting.device)
            ratio = peak_bytes / forecast_bytes
            return {"peak_bytes": peak_bytes, "forecast_bytes": forecast_bytes, "peak_to_forecast": ratio}

        yield tried(f"{setting.sizes.network}, float32, {side_px} px", measured, setting.device)
        free(setting.device)
