"""Which average of the weights a run keeps."""

from __future__ import annotations

from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.runtime.calls.engine_state import EngineState
from workflows.finetuning.optimizers.switching import SwitchingOptimizer
from workflows.training.averages.averaged_weights import AveragedWeights
from workflows.training.averages.ema import MovingAverage
from workflows.training.averages.optimizer_average import OptimizerAverage
from workflows.training.start import SavedRun


def make_average(
    decay: float | None, engine: EngineState, model: nn.Module, saved: SavedRun | None
) -> AveragedWeights | None:
    """Return the average of the weights that is evaluated, restored if the run is resumed; None without an average.

    Args:
        decay: ``run.ema``.
        engine: The trainers' engine.
        model: The module that it trains.
        saved: The state of a resumed run; None for a new run.
    """
    # Such an optimizer, schedule-free ones among them, keeps the averaged weights itself.
    if isinstance(engine.optimizer, SwitchingOptimizer):
        return OptimizerAverage(engine, model)
    if decay is None:
        return None
    average = MovingAverage(model, decay)
    if saved is not None and saved.checkpoint.averaged is not None:
        average.load(saved.checkpoint.averaged)
    return average


def check_average(decay: float | None, engine: EngineState) -> None:
    """Check that a run keeps one average at most.

    Raises:
        RequestError: ``run.ema`` is given, and the optimizer keeps an average, too.
    """
    if decay is not None and isinstance(engine.optimizer, SwitchingOptimizer):
        raise RequestError(
            f"run.ema: given {decay:g}, but {type(engine.optimizer).__name__} keeps an average of the weights itself, "
            f"which is evaluated; leave run.ema out"
        )
