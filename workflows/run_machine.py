"""The machine model of a run, which rounds to TF32 if the run does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyfi_core.cost.machine import MachineModel
    from workflows.config.run import Config


def machine_of(config: Config, name: str | None = None) -> MachineModel:
    """Return the machine model of this name or file, rounding to TF32 if the run does; None: ``default_machine``."""
    from hyfi_core.cost.machines.machine_file import load_machine

    machine = load_machine(name or default_machine(config))
    return machine.with_tf32() if config.run.rounds_to_tf32 else machine


def default_machine(config: Config) -> str:
    """Return the name of the machine model to use for this run's ``run.device`` if the user gives none."""
    return "h100" if config.run.device == "cuda" else "cpu"
