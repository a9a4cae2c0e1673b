"""The kind of a run as the training loop sees it: whole images, bags of tiles, or bags of features.

::

                  ImageInputs                      TileInputs                           FeatureInputs
    model         one network                      encoder and aggregator               aggregator
    engine        parallelize                      parallelize_tiles                    parallelize_tiles
    batch         boxes of images                  tiles                                vectors
    evaluation    one image of each slide          all tiles of each slide              all vectors of each slide
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from data.loading.decode import Samples
from hyfi_core.runtime.engine import Engine
from hyfi_core.tiles.engine import TilesEngine
from workflows.evaluation.evaluate import EvaluationSet, InferenceEngine
from workflows.finetuning.freezing import Freezing
from workflows.training.job import TrainingJob
from workflows.training.memory import advice_of, check_memory
from workflows.training.start import Roles, SavedRun
from workflows.training.throughput import Throughput

TrainingEngine = Engine | TilesEngine
Tell = Callable[[str], None]


class Batches(Protocol):
    """The batches of one trainer's replica.

    Attributes:
        wait_s: Seconds for which ``batch`` has waited so far.
        reports: What each loader rank has read and sent; empty without loaders.
    """

    @property
    def wait_s(self) -> float:
        """Return the seconds for which ``batch`` has waited so far."""
        ...

    @property
    def reports(self) -> Mapping[int, Mapping[str, Any]]:
        """Return what each loader rank has read and sent; empty without loaders."""
        ...

    def batch(self, turn: int) -> Any:
        """Return the input of a turn as the engine takes it."""
        ...

    def close(self, stopped: bool) -> None:
        """Release loaders; ``stopped``: the run ends early."""
        ...


class RunInputs(ABC):
    """The kind of a run, for one rank.

    Args:
        job: The run.
    """

    def __init__(self, job: TrainingJob) -> None:
        self.job = job

    @property
    def outputs_to_place(self) -> int | None:
        """Number of outputs of a model whose traffic decides the order of trainers; None: any order is as good."""
        return None

    @abstractmethod
    def check(self) -> list[dict[str, Any]]:
        """Return the rows of ``coverage.csv``; one rank does it for all.

        Raises:
            RequestError: Slides or model cannot be used as they are.
        """

    def check_memory(self, roles: Roles, device: str) -> list[str]:
        """Return messages about memory and cores, see ``training.memory.check_memory`` (collective)."""
        return check_memory(self.job, roles, device)

    def advice(self, forecast: Sequence[str]) -> str:
        """Return advice to print if memory runs out."""
        return advice_of(self.job, forecast)

    @abstractmethod
    def make_model(self, device: str, loads: bool, tell: Tell) -> tuple[nn.Module, Freezing | None]:
        """Return the initial model, ready for training and on its device, and what is frozen in it.

        Args:
            device: Device of this trainer.
            loads: Whether to load files of weights and report it; False if another rank or a checkpoint provides them.
            tell: Called with each line for the user.
        """

    @abstractmethod
    def make_engine(self, model: nn.Module, roles: Roles) -> TrainingEngine:
        """Return the trainers' engine (collective over them)."""

    @abstractmethod
    def reserve(self, engine: TrainingEngine, model: nn.Module, roles: Roles) -> None:
        """Try the memory and disk of a step and a validation, before anything is written (collective over trainers).

        Raises:
            RequestError: There is too little memory or disk, or the model cannot be trained so.
        """

    def describe_change(self, saved: SavedRun, engine: TrainingEngine) -> str | None:
        """Return how a resumed run differs from one that was not interrupted; None if it does not."""
        return None

    @abstractmethod
    def throughput(self, engine: TrainingEngine, peak: float | None, device: str) -> Throughput:
        """Return the converter of slides per second, on trainer 0."""

    @abstractmethod
    def batches(self, roles: Roles, engine: TrainingEngine, start: int) -> Batches:
        """Return the batches after step ``start``."""

    @abstractmethod
    def loader_samples(self) -> Samples:
        """Return the training slides as loaders read them."""

    @abstractmethod
    def evaluation_set(self) -> EvaluationSet:
        """Return the evaluation set of the run."""

    @abstractmethod
    def inference(self, engine: TrainingEngine) -> InferenceEngine:
        """Return the engine with the interface that evaluation needs."""

    def step_record(self, engine: TrainingEngine) -> dict[str, Any]:
        """Return further keys for the record of a step, on trainer 0."""
        return {}

    def model_json(self) -> dict[str, Any]:
        """Return the content of ``model.json`` for prediction, without the step."""
        return self.job.model_json()

    def warnings(self, engine: TrainingEngine) -> list[str]:
        """Return warnings for the user at the start; called on rank 0."""
        return self.job.warnings()
