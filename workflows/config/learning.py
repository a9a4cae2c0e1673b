"""The sections ``optimizer``, ``lr_schedule`` and ``validation`` of a run's YAML: updates and their evaluation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from workflows.config.section import Count, Positive, Rate, Section, Share


class OptimizerConfig(Section):
    """How gradients change weights."""

    name: Literal["sgd", "adamw"] = Field("adamw", description="sgd or adamw: how a gradient becomes an update")
    lr: float = Field(1e-3, gt=0, allow_inf_nan=False, description="a number > 0: learning rate after the warm-up")
    momentum: Share = Field(0.9, description="a number from 0 to 1: how much of the last update is carried over (sgd)")
    betas: tuple[Share, Share] = Field(
        (0.9, 0.999),
        description="two numbers from 0 to 1: decays of the means of gradients and of their squares (adamw)",
    )
    weight_decay: Rate = Field(0.0, description="a number ≥ 0: how strongly weights are drawn to 0")
    max_norm: float | None = Field(
        None, gt=0, description="a number > 0: gradients are clipped to this global norm; left out: they are not"
    )
    accumulate: Positive = Field(
        1, description="a whole number ≥ 1: batches whose mean gradient makes one update (a step)"
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="none, linear or sqrt: how lr grows with the slides of one update: not, by slides / lr_batch, or "
        "by its root",
    )
    lr_batch: Positive = Field(
        1, description="a whole number ≥ 1: slides of one update that lr is meant for (lr_scaling: linear, sqrt)"
    )

    def scaled_lr(self, batch: int) -> float:
        """Return the learning rate for updates of ``batch`` slides."""
        power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[self.lr_scaling]
        return float(self.lr * (batch / self.lr_batch) ** power)


class LrScheduleConfig(Section):
    """How the learning rate moves; counted in steps (updates)."""

    name: Literal["constant", "cosine", "step", "linear"] = Field(
        "constant", description="constant, cosine, step or linear: how the rate moves after the warm-up"
    )
    warmup_steps: Count = Field(0, description="a whole number ≥ 0: steps of linear rise at the start")
    end_factor: Share = Field(
        0.0, description="a number from 0 to 1: last rate / rate after the warm-up (cosine, linear)"
    )
    every_steps: Positive | None = Field(
        None, description="a whole number ≥ 1: steps between two drops (step, which needs it)"
    )
    gamma: float = Field(0.1, gt=0, le=1, description="a number above 0, at most 1: factor of each drop (step)")

    @model_validator(mode="after")
    def _drops_are_placed(self) -> LrScheduleConfig:
        if self.name == "step" and self.every_steps is None:
            raise ValueError("name: step needs every_steps, the steps between two drops")
        return self


class ValidationConfig(Section):
    """When and on what the weights are evaluated."""

    every_steps: Positive | None = Field(
        None, description="a whole number ≥ 1: steps between two validations; left out: those of an epoch"
    )
    split: Literal["val", "train"] = Field(
        "val", description="val or train: whose slides evaluate the weights (test is for `hyfi validate`)"
    )
    metric: Literal["auroc", "balanced_accuracy", "f1", "quadratic_kappa", "calibration_error", "loss"] = Field(
        "auroc",
        description="auroc, balanced_accuracy, f1, quadratic_kappa, calibration_error or loss: what makes a "
        "checkpoint the best",
    )
    policy: Literal["all", "latest"] = Field(
        "all",
        description="all or latest: what is evaluated where validators are behind: every checkpoint (all), or only the "
        "newest, so that training never waits (latest)",
    )
    grids: tuple[tuple[Positive, Positive], ...] | None = Field(
        None,
        min_length=1,
        description="a list of [rows, columns], as in [[1, 2]]: validators that each image is spread over, a grid for"
        " each stage; left out: all of them in one row",
    )
    cells: tuple[Positive, Positive] | None = Field(
        None,
        description="[rows, columns], as in [4, 4]: each validator evaluates images of its own, one cell after the "
        "other, in the memory of a cell; left out: validators share each image as grids says",
    )

    @model_validator(mode="after")
    def _alone_with_its_cells(self) -> ValidationConfig:
        if self.cells is not None and self.grids not in (None, ((1, 1),)):
            raise ValueError(
                f"cells: {list(self.cells)} and grids: {[list(grid) for grid in self.grids or ()]}; with cells every "
                "validator has images of its own: leave grids out, or leave cells out"
            )
        return self
