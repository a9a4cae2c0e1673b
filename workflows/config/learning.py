"""The sections ``optimizer``, ``lr_schedule`` and ``validation`` of a run's YAML: updates and their evaluation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from workflows.config.section import Count, Positive, Rate, Section, Share
from workflows.config.tasks import TASKS


class OptimizerConfig(Section):
    """The optimizer: how gradients update the weights."""

    name: Literal["sgd", "adamw"] = Field("adamw", description="sgd or adamw: the optimizer")
    lr: float = Field(1e-3, gt=0, allow_inf_nan=False, description="a number > 0: learning rate after the warm-up")
    momentum: Share = Field(0.9, description="a number from 0 to 1: momentum (sgd)")
    betas: tuple[Share, Share] = Field(
        (0.9, 0.999),
        description="two numbers from 0 to 1: decay of the running averages of the gradient and its square (adamw)",
    )
    weight_decay: Rate = Field(0.0, description="a number ≥ 0: weight decay")
    max_norm: float | None = Field(
        None, gt=0, description="a number > 0: gradients are clipped to this global norm; default: no clipping"
    )
    accumulate: Positive = Field(
        1, description="a whole number ≥ 1: batches whose gradients are averaged for one update (a step)"
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="none, linear or sqrt: how lr is scaled with the slides of one update: not, by slides / "
        "lr_batch, or by its square root",
    )
    lr_batch: Positive = Field(
        1, description="a whole number ≥ 1: slides of one update for which lr is given (lr_scaling: linear, sqrt)"
    )

    def scaled_lr(self, batch: int) -> float:
        """Return the learning rate for updates of ``batch`` slides."""
        power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[self.lr_scaling]
        return float(self.lr * (batch / self.lr_batch) ** power)


class LrScheduleConfig(Section):
    """The learning rate over the run, in steps (updates)."""

    name: Literal["constant", "cosine", "step", "linear"] = Field(
        "constant", description="constant, cosine, step or linear: the learning rate after the warm-up"
    )
    warmup_steps: Count = Field(0, description="a whole number ≥ 0: steps of linear warm-up at the start")
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
            raise ValueError("name: step needs every_steps, the number of steps between two drops")
        return self


class ValidationConfig(Section):
    """When and on what the weights are evaluated."""

    every_steps: Positive | None = Field(
        None, description="a whole number ≥ 1: steps between two validations; default: one epoch"
    )
    split: Literal["val", "train"] = Field(
        "val", description="val or train: split to validate on (test is for `hyfi validate`)"
    )
    metric: str = Field(
        "",
        description="; ".join(f"{', '.join(facts.selecting)} ({name})" for name, facts in TASKS.items())
        + ": metric that selects the best checkpoint; default: the first of the task",
    )
    policy: Literal["all", "latest"] = Field(
        "all",
        description="all or latest: checkpoints to validate if validators fall behind: every one (all), or only the "
        "newest, so that training never waits (latest)",
    )
    grids: tuple[tuple[Positive, Positive], ...] | None = Field(
        None,
        min_length=1,
        description="a list of [rows, columns], as in [[1, 2]]: validators among which each image is divided, a grid "
        "for each stage; default: all in one row",
    )
    cells: tuple[Positive, Positive] | Literal["auto"] | None = Field(
        None,
        description="[rows, columns], as in [4, 4], or auto: each validator evaluates its own images, one cell after "
        "the other, to save memory, spilling as plan.spill says; auto: as many as plan.memory_bytes requires; default: "
        "each image is divided as grids says",
    )

    @model_validator(mode="after")
    def _alone_with_its_cells(self) -> ValidationConfig:
        if self.cells is not None and self.grids not in (None, ((1, 1),)):
            cells = self.cells if self.cells == "auto" else list(self.cells)
            raise ValueError(
                f"cells: {cells} and grids: {[list(grid) for grid in self.grids or ()]}; use either: with "
                f"cells, every validator evaluates its own images"
            )
        return self
