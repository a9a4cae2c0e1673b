"""The members of an ensemble, and their common input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

from torch import nn

from data.loading.normalise import Normalisation
from data.samples.colours.stain_normalisation import StainNormalisation
from hyfi_core.errors import RequestError
from hyfi_core.models.by_name import build_model, is_built_in
from hyfi_core.runtime.checkpoint import load_checkpoint
from hyfi_core.stored_state import fill_buffers
from pathology.predict.readout import ClassReadout, Readout

MIN_COVERAGE = 0.9
"""Default for checkpoints without this value."""


_OF_IMAGES = ("class_names", "task", "mpp", "size_px", "view", "align_px", "normalisation")
_EXAMPLE = (
    '{"model": {"name": "package.module:factory", "classes": 2}, "class_names": ["no", "yes"], "task": "multiclass", '
    '"mpp": 1.0, "size_px": [8192, 8192], "view": "pack", "align_px": 32, "normalisation": {"mean": [0.485, 0.456, '
    '0.406], "std": [0.229, 0.224, 0.225]}}'
)


def check_complete(config: Mapping[str, Any], checkpoint: Path, builds: bool = True) -> None:
    """Check that ``model.json`` has all keys from which images and, if ``builds``, the model are built.

    Raises:
        RequestError: Keys are missing; the message names them, and what would work.
    """
    model = config.get("model")
    fields_of_model: list[str] = []
    if builds:
        fields_of_model = ["model"] if model is None else ["model.name", "model.classes"]
    present = {*config, *(f"model.{name}" for name in model or ())}
    missing = [name for name in (*fields_of_model, *_OF_IMAGES) if name not in present]
    if missing:
        remedy = (
            f"save with engine.save(folder, model_json={_EXAMPLE}), with your values"
            if config.get("saved_by") == "Engine.save"
            else "use a checkpoint of hyfi train"
        )
        raise RequestError(
            f"checkpoint {checkpoint} does not say how images are read for it: its model.json has no "
            f"{', '.join(missing)}; {remedy}"
        )


def temperature_of(config: Mapping[str, Any]) -> float:
    """Return the temperature by which a checkpoint's logits are divided; 1 if not fitted."""
    return float((config.get("calibration") or {}).get("temperature", 1.0))


@dataclass(frozen=True, eq=False)
class Member:
    """One trained model.

    Attributes:
        path: The checkpoint's folder, as given by the user.
        model: The module with the checkpoint's weights, in evaluation mode.
        config: Content of the checkpoint's ``model.json``.
        averaged: Whether the weights are the average that training has kept.
        own_readout: Readout of its outputs; None: that of classes.
    """

    path: str
    model: nn.Module
    config: Mapping[str, Any]
    averaged: bool = False
    own_readout: Readout | None = None

    @classmethod
    def load(
        cls,
        checkpoint: Path,
        model: nn.Module | None = None,
        readout_of: Callable[[Mapping[str, Any]], Readout] | None = None,
    ) -> Member:
        """Return a checkpoint's model, with the average of its weights if it has one.

        Args:
            checkpoint: The checkpoint's folder.
            model: A module of its architecture, whose weights are replaced; None: build the model of ``model.json``.
            readout_of: Returns the readout for a ``model.json``; None: the task must be multiclass.

        Raises:
            RequestError: The checkpoint is damaged, its model cannot be built, or its weights do not match the model.
        """
        loaded = load_checkpoint(checkpoint)
        check_complete(loaded.model, checkpoint, builds=model is None)
        # Encoders and their aggregators are built by `workflows`, which this package does not import.
        if model is None and (loaded.model.get("tiles") or loaded.model.get("features")):
            what = "an encoder of tiles" if loaded.model.get("tiles") else "an aggregator of features"
            raise RequestError(f"checkpoint {checkpoint} has {what}; predict with `hyfi predict`, or pass model=")
        module = build_model(loaded.model["model"]) if model is None else model
        try:
            module.load_state_dict(loaded.inference_weights)
            fill_buffers(module, loaded.buffers or {})
        except RuntimeError as error:
            raise RequestError(f"checkpoint {checkpoint}: its weights do not match its model: {error}") from error
        readout = None if readout_of is None else readout_of(loaded.model)
        averaged = loaded.averaged is not None
        return cls(str(checkpoint), module.eval(), config=loaded.model, averaged=averaged, own_readout=readout)

    @property
    def digest(self) -> str:
        """SHA-256 of the file of weights."""
        return str(self.config.get("files", {}).get("model.safetensors", {}).get("sha256", ""))

    @property
    def built_in(self) -> bool:
        """Whether the network is one of this package, whose captures are covered by tests."""
        return is_built_in(str(self.config.get("model", {}).get("name", "")))

    @property
    def pooling(self) -> Literal["mean", "max"]:
        """Pooling of the head; the logits of several images of one slide are combined in the same way."""
        return "max" if self.config.get("model", {}).get("pool") == "max" else "mean"

    @property
    def min_coverage(self) -> float:
        """Smallest fraction of a slide's tissue that must be seen for a prediction, as in training."""
        return float(self.config.get("min_coverage", MIN_COVERAGE))

    @property
    def temperature(self) -> float:
        """See `temperature_of`."""
        return temperature_of(self.config)

    @property
    def readout(self) -> Readout:
        """The readout of its outputs.

        Raises:
            RequestError: The task is not ``multiclass``, and the model was loaded without a readout.
        """
        if self.own_readout is not None:
            return self.own_readout
        task = self.config.get("task", "multiclass")
        if task != "multiclass":
            raise RequestError(
                f"{self.path}: its task is {task!r}; predict with `hyfi predict`, or workflows.predict_slides"
            )
        return ClassReadout(tuple(map(str, self.config["class_names"])), self.temperature)

    @property
    def normalisation(self) -> Normalisation:
        """Normalisation of its images."""
        return Normalisation.from_json(self.config["normalisation"])


@dataclass(frozen=True)
class InputSpec:
    """Input properties that all members must have in common.

    Attributes:
        task: what is predicted, as ``data.task`` of a configuration.
        class_names: in the order of the logits.
        mpp: micrometres per pixel of the image.
        size_px: (height, width) of the image.
        view: how the image is made from a slide.
        align_px: grid to which pieces of tissue are aligned.
        tiles: (size_px, stride_px, least share of tissue) of tiles, for models with an encoder of tiles; else None.
        features: length of a tile's vector, for models of stored features; else None.
        stain: normalisation of each slide's colours; None: none.
        bag: ``slide``, or ``case`` if all slides of a case are one bag of tiles.
    """

    task: str
    class_names: tuple[str, ...]
    mpp: float
    size_px: tuple[int, int]
    view: Literal["pack", "crop"]
    align_px: int
    tiles: tuple[int, int, float] | None = None
    features: int | None = None
    stain: StainNormalisation | None = None
    bag: str = "slide"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> InputSpec:
        """Read ``model.json``.

        Raises:
            RequestError: a key is missing or invalid.
        """
        try:
            height, width = (int(side) for side in config["size_px"])
            spec = cls(
                task=str(config["task"]),
                class_names=tuple(str(name) for name in config["class_names"]),
                mpp=float(config["mpp"]),
                size_px=(height, width),
                view=cast(Literal["pack", "crop"], config["view"]),
                align_px=int(config["align_px"]),
                tiles=_tiles_of(config),
                features=None if not config.get("features") else int(config["features"]["length"]),
                stain=StainNormalisation.from_json(config.get("stain_normalisation")),
                bag=str(config.get("bag", "slide")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(f"the checkpoint's model.json has no valid {error}; use another checkpoint") from error
        return spec


def _tiles_of(config: Mapping[str, Any]) -> tuple[int, int, float] | None:
    tiles = config.get("tiles")
    return None if not tiles else (int(tiles["size_px"]), int(tiles["stride_px"]), float(tiles["min_tissue"]))


def common_input_spec(members: Sequence[Member]) -> InputSpec:
    """Return the common input of an ensemble's members, which also predict the same numbers.

    Raises:
        RequestError: two of them differ; the message has both values.
    """
    first = InputSpec.of(members[0].config)
    for member in members[1:]:
        spec = InputSpec.of(member.config)
        # All fields must be equal: every member must see the input that it was trained on.
        for item in fields(InputSpec):
            mine, theirs = getattr(first, item.name), getattr(spec, item.name)
            if mine != theirs:
                raise RequestError(
                    f"these checkpoints cannot form an ensemble: {item.name} is {mine} in {members[0].path} "
                    f"and {theirs} in {member.path}"
                )
        names, member_names = members[0].readout.columns, member.readout.columns
        if names != member_names:
            raise RequestError(
                f"these checkpoints cannot form an ensemble: {members[0].path} predicts {', '.join(names)}, and "
                f"{member.path} predicts {', '.join(member_names)}"
            )
    return first
